"""The command line: every command parses its arguments, calls one function of the library, and prints.

The modules here import the library inside their commands: torch and timm take seconds, and help, history
and reports need neither.
"""
