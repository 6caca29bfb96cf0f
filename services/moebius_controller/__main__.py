"""`python -m moebius_controller`."""

from moebius_controller.main import main

if __name__ == "__main__":
    main()
