"""`python -m rtrain`: the entry point of a Ray job, where no console script is on PATH."""

from rtrain.cli.app import main

if __name__ == "__main__":
    main()
