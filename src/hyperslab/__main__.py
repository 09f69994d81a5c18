"""Runs the command of ``hyperslab ...`` and of ``python -m hyperslab ...``, also under torchrun."""

from hyperslab.util.startup import begin_command


def main() -> None:
    """Prepare this process, then import the commands, which takes time, and run one."""
    begin_command()
    from hyperslab.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
