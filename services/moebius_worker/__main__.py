"""`python -m moebius_worker`."""

from moebius_worker.main import main

if __name__ == "__main__":
    main()
