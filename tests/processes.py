"""Code run in an interpreter of its own, or here as if it were."""
import contextlib
import io
import os
import subprocess
import sys


def python(code, *argv, **env):
    "What a fresh interpreter prints; it fails on warnings and says nothing else."
    command = [sys.executable, '-W', 'error', '-c', code, *map(str, argv)]
    env = {**os.environ, **{name: str(value) for name, value in env.items()}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert (done.returncode, done.stderr) == (0, '')
    return done.stdout


def printed(code):
    "What the code prints in this process, where the kernels are compiled and loaded."
    with contextlib.redirect_stdout(io.StringIO()) as out: exec(code, {})
    return out.getvalue()
