"""Lays out the server's backends in the cache ahead, for an image whose root file system is read-only.

Run by the Dockerfiles once Octavo is installed, with $OCTAVO_CACHE set. The kernels are compiled by `octavo
build-kernels`; this does the same for what `octavo serve` would assemble, under both names it is served as.
"""

from octavo.serving import installation


def main() -> None:
    server = installation.find()
    for names in (("octavo",), ("octavo", "vllm")):
        print(installation.assemble_backends(server, names), flush=True)


if __name__ == "__main__":
    main()
