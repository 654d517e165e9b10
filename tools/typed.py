"""Which share of the interface has types; fails below the bar, and lists the rest.

Pyright otherwise checks that types which are written fit together; here, that they are."""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.95


def completeness():
    "What pyright finds out about the installed package."
    command = [Path(sys.executable).with_name('pyright'), '--pythonpath', sys.executable,
               '--verifytypes', 'fucina', '--ignoreexternal', '--outputjson']
    # It runs no code, as finding an editable installation would take: show it the folder.
    env = os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)['typeCompleteness']


if __name__ == '__main__':
    found = completeness()
    symbols = [s for s in found['symbols'] if s['isExported']]
    lost = [s['name'] for s in symbols if not s['isTypeKnown'] or s['isTypeAmbiguous']]
    share = 1 - len(lost) / len(symbols) if symbols else 0.0
    if share < BAR: print(*lost, sep='\n')
    print(f'{share:.1%} of {len(symbols)} names have a type; at least {BAR:.0%} must')
    sys.exit(share < BAR)
