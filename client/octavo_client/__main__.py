"""`python -m octavo_client`: the `octavo` script where it is not on PATH."""

from octavo_client.cli import main

if __name__ == "__main__":
    main()
