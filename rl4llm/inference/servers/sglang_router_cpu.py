"""sglang-router beside an SGLang that cannot be imported as it is, which is so on a machine without a GPU.

Run by the Python of the servers' environment: ``python sglang_router_cpu.py <the router's flags>``. All that the router
wants of SGLang is tracing, and it goes on without.
"""

import sys


def main() -> None:
    """Route until told to stop."""
    sys.modules["sglang"] = None  # type: ignore[assignment] # an import of it then fails at once, as where it is not installed

    from sglang_router.launch_router import main as route

    route()


if __name__ == "__main__":
    main()
