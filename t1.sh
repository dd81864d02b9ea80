. ./env.sh; unset COLUMNS; clear
rm -rf cars; cofima learn data/cars -o cars model.img_size=96 --minutes 1; echo rc""=$?
