"""Entry point of ``python -m cofima``."""

from cofima.cli.main import main

if __name__ == "__main__":
    main()
