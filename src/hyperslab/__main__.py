"""`python -m hyperslab`, also under torchrun."""

from hyperslab.cli import main

if __name__ == "__main__":
    main()
