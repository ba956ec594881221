"""Ends with 0 when the URL that is its argument answers 200 within four seconds, else with 1 and why.

The images' health check; needs Python's standard library only.
"""

import sys
import urllib.request

_TIMEOUT_S = 4


def main() -> int:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy must not be in between
    try:
        with direct.open(sys.argv[1], timeout=_TIMEOUT_S) as answer:
            healthy = bool(answer.status == 200)
            print(answer.status)
    except OSError as error:
        print(error)
        return 1
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
