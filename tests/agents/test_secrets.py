"""What of the environment is kept from the run's processes."""

import subprocess
import sys

from tests.layout import ROOT

PROGRAM = """
import os
from agents.claude import secrets
secrets.take()
print(*sorted(secrets.TAKEN))
left = open("/proc/self/environ", "rb").read()
child = os.popen("env").read()
print([word for word in ("w1", "w2", "w3", "w4", "w5", "w6") if word.encode() in left])
print([word for word in ("w1", "w2", "w3", "w4", "w5", "w6") if word in child + str(os.environ)])
print(secrets.hand_over()["MY_TOKEN"], secrets.TAKEN)
"""
SECRETS = {
    "MY_TOKEN": "w1",
    "GITHUB_PAT": "w2",
    "DATABASE_URL": "postgresql://me:w3@host/db",
    "SIGNED_WITH": "-----BEGIN PRIVATE KEY-----w4",
    "all_proxy": "socks5://me:w5@proxy:3128",
}
HARMLESS = {
    "PATH": "/usr/bin:/bin",
    "MIRROR": "https://localhost:8080/w6",
    "OLDPWD": "/",
    "PWD": "/",
}


def test_variables_that_look_like_secrets_by_name_or_value_are_taken() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=SECRETS | HARMLESS,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " ".join(sorted(SECRETS)), "['w6']", "['w6']", "w1 {}"
    ]  # fmt: skip
