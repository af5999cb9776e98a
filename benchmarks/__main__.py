"""Measure one subject: python -m benchmarks NAME [--rounds N] [--quick] [--json FILE]."""

import argparse
import importlib
import json
import os
import pkgutil

from .harness import Bench

SUBJECTS = sorted(
    module.name
    for module in pkgutil.iter_modules([os.path.dirname(__file__)])
    if module.name not in ("__main__", "harness") and not module.ispkg
)


def main():
    """Run the command; a benchmark asserts that its results are right before it times them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: the subject's)")
    parser.add_argument("--quick", action="store_true", help="one round over few images")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    module = importlib.import_module(f".{args.subject}", __package__)
    if args.worker:
        name, *values = args.worker
        print(json.dumps(getattr(module, name)(*values)))
        return
    bench = Bench(args.subject, args.rounds or module.ROUNDS, quick=args.quick)
    module.run(bench)
    if args.json:
        bench.save(args.json)


if __name__ == "__main__":
    main()
