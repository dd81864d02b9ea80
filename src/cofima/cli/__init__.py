"""The command line: each command parses its arguments, calls one function of the library, and prints.

The modules import the library inside their commands: importing torch and timm takes seconds, and help,
history and reports need neither.
"""
