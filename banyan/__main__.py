"""`python -m banyan` is the `banyan` command."""

from banyan.cli import main

if __name__ == "__main__":
    main()
