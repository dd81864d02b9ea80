"""Let ``python -m cofima`` be the command line."""

from cofima.cli.main import main

if __name__ == "__main__":
    main()
