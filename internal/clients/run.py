#!/usr/bin/env python3
"""Runs every client on two mounts of one cluster and prints a summary."""

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SKIPPED = 77  # exit status of a client whose packages are not installed


def clients(names):
    every = sorted(HERE.glob("client_*")) + sorted(HERE.glob("tool_*"))
    short = {p.stem.split("_", 1)[1]: p for p in every}
    unknown = [n for n in names if n not in short]
    if unknown:
        sys.exit(f"run.py: no client {unknown}; there are {sorted(short)}")
    return {n: p for n, p in short.items() if not names or n in names}


def run_one(name, path, a, b, limit):
    work_a, work_b = pathlib.Path(a, name), pathlib.Path(b, name)
    shutil.rmtree(work_a, ignore_errors=True)
    work_a.mkdir()
    env = dict(os.environ, CLIENT_A=str(work_a), CLIENT_B=str(work_b), PYTHONPATH=str(HERE),
               CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
               OMP_NUM_THREADS="1", TMPDIR=tempfile.gettempdir(), JAX_PLATFORMS="cpu")
    command = [sys.executable, str(path)] if path.suffix == ".py" else ["bash", str(path)]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, env=env, cwd=tempfile.gettempdir(), stdout=out,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            status = f"no end after {limit} s"
        # Whatever the client has left running ends with it.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        out.seek(0)
        text = out.read()
    took = time.monotonic() - start
    verdict = {0: "passed", SKIPPED: "SKIPPED"}.get(status, "FAILED")
    print(f"{verdict:8} {name:22} {took:6.1f} s", flush=True)
    if verdict != "passed":
        print("\n".join("    " + line for line in text.splitlines()[-60:]), flush=True)
    if verdict == "FAILED":
        print(f"    exit: {status}", flush=True)
    else:
        shutil.rmtree(work_a, ignore_errors=True)
    return verdict


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--a", required=True, help="directory that is written to")
    p.add_argument("--b", required=True, help="another mount of the same directory")
    p.add_argument("--limit", type=float, default=600, help="seconds a client may take")
    p.add_argument("names", nargs="*", help="clients to run; all when none is named")
    args = p.parse_args()
    count = dict.fromkeys(("passed", "FAILED", "SKIPPED"), 0)
    for name, path in clients(args.names).items():
        count[run_one(name, path, args.a, args.b, args.limit)] += 1
    for package in ("torch", "transformers", "safetensors", "deepspeed", "megatron-core", "orbax-checkpoint",
                    "jax", "torch-checkpointing", "fastsafetensors", "numpy", "h5py", "zarr", "pyarrow"):
        try:
            print(f"{package} {importlib.metadata.version(package)}", end="  ")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} (missing)", end="  ")
    print(f"\n{count['passed']} passed, {count['FAILED']} failed, {count['SKIPPED']} skipped")
    sys.exit(1 if count["FAILED"] or not count["passed"] else 0)


if __name__ == "__main__":
    main()
