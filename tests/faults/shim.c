/* Faults of a file system, at the n-th call that touches a folder: an error, or the death of the process.

   Loaded before the C library (LD_PRELOAD), so that it sees the calls of Python, of torch and of safetensors
   alike. It does nothing until fault_arm() is called, which a forked child does for itself. The count is in
   memory that processes forked later share, so a grid and its workers count together. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, ERROR, KILL };
enum { MARKS = 64 };

static struct shared { long count, marked, marks[MARKS]; } *shared;
static int armed, mode, code, reads;
static long at;
static char root[4096];

void fault_arm(const char *folder, int how, long number, int error, int also_reads) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(root, sizeof root, "%s", folder);
    mode = how, at = number, code = error, reads = also_reads, armed = 1;
}

long fault_count(void) { return shared->count; }

/* The calls by which something came into force: those that renamed a file to CURRENT. */
long fault_mark(long number) { return number < shared->marked ? shared->marks[number] : 0; }

static int hit(void) {
    if (__atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST) != at || mode == COUNT) return 0;
    if (mode == KILL) for (kill(getpid(), SIGKILL);;) pause();
    errno = code;
    return 1;
}

static int below(const char *path) { return strncmp(path, root, strlen(root)) == 0; }

static int touches_fd(int fd) {
    char link[64], path[4096];
    if (!armed || fd <= 2) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int touches(int folder, const char *path) {
    char here[4096];
    if (!armed || !path) return 0;
    if (path[0] == '/') return below(path);
    if (folder != AT_FDCWD) return touches_fd(folder);
    return getcwd(here, sizeof here) && below(here);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(condition, value) do { if ((condition) && hit()) return value; } while (0)
#define CHANGES(flags) (reads || ((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC)))
#define MODE(flags) va_list list; va_start(list, flags); mode_t bits = va_arg(list, mode_t); va_end(list)

int open(const char *path, int flags, ...) {
    MODE(flags);
    FAIL(CHANGES(flags) && touches(AT_FDCWD, path), -1);
    return REAL(open)(path, flags, bits);
}

int open64(const char *path, int flags, ...) {
    MODE(flags);
    FAIL(CHANGES(flags) && touches(AT_FDCWD, path), -1);
    return REAL(open64)(path, flags, bits);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags);
    FAIL(CHANGES(flags) && touches(folder, path), -1);
    return REAL(openat)(folder, path, flags, bits);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags);
    FAIL(CHANGES(flags) && touches(folder, path), -1);
    return REAL(openat64)(folder, path, flags, bits);
}

ssize_t write(int fd, const void *bytes, size_t size) {
    FAIL(touches_fd(fd), -1);
    return REAL(write)(fd, bytes, size);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    FAIL(touches_fd(fd), -1);
    return REAL(writev)(fd, parts, number);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t where) {
    FAIL(touches_fd(fd), -1);
    return REAL(pwrite)(fd, bytes, size, where);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t where) {
    FAIL(touches_fd(fd), -1);
    return REAL(pwrite64)(fd, bytes, size, where);
}

ssize_t sendfile(int to, int from, off_t *where, size_t size) {
    FAIL(touches_fd(to), -1);
    return REAL(sendfile)(to, from, where, size);
}

ssize_t sendfile64(int to, int from, off64_t *where, size_t size) {
    FAIL(touches_fd(to), -1);
    return REAL(sendfile64)(to, from, where, size);
}

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *where, size_t size, unsigned flags) {
    FAIL(touches_fd(to), -1);
    return REAL(copy_file_range)(from, start, to, where, size, flags);
}

int posix_fallocate(int fd, off_t where, off_t size) {
    FAIL(touches_fd(fd), code);
    return REAL(posix_fallocate)(fd, where, size);
}

int posix_fallocate64(int fd, off64_t where, off64_t size) {
    FAIL(touches_fd(fd), code);
    return REAL(posix_fallocate64)(fd, where, size);
}

int ftruncate(int fd, off_t size) {
    FAIL(touches_fd(fd), -1);
    return REAL(ftruncate)(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    FAIL(touches_fd(fd), -1);
    return REAL(ftruncate64)(fd, size);
}

int fsync(int fd) {
    FAIL(touches_fd(fd), -1);
    return REAL(fsync)(fd);
}

int fdatasync(int fd) {
    FAIL(touches_fd(fd), -1);
    return REAL(fdatasync)(fd);
}

/* Only files in the folder are mapped to be written. */
int msync(void *bytes, size_t size, int flags) {
    FAIL(armed, -1);
    return REAL(msync)(bytes, size, flags);
}

int chmod(const char *path, mode_t bits) {
    FAIL(touches(AT_FDCWD, path), -1);
    return REAL(chmod)(path, bits);
}

int rename(const char *from, const char *to) {
    const char *name = strrchr(to, '/');
    int counted = touches(AT_FDCWD, to);
    FAIL(counted, -1);
    long now = counted ? shared->count : 0;
    int failed = REAL(rename)(from, to);
    if (counted && !failed && !strcmp(name ? name + 1 : to, "CURRENT") && shared->marked < MARKS)
        shared->marks[shared->marked++] = now;
    return failed;
}

int link(const char *from, const char *to) {
    FAIL(touches(AT_FDCWD, to), -1);
    return REAL(link)(from, to);
}

int symlink(const char *from, const char *to) {
    FAIL(touches(AT_FDCWD, to), -1);
    return REAL(symlink)(from, to);
}

int unlink(const char *path) {
    FAIL(touches(AT_FDCWD, path), -1);
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    FAIL(touches(folder, path), -1);
    return REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) {
    FAIL(touches(AT_FDCWD, path), -1);
    return REAL(rmdir)(path);
}

int mkdir(const char *path, mode_t bits) {
    FAIL(touches(AT_FDCWD, path), -1);
    return REAL(mkdir)(path, bits);
}
