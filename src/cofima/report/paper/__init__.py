"""The tables of the paper: what is published, and runs that follow its protocol beside it."""
