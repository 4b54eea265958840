"""Everything is in pyproject.toml; this file only refuses what the project is not made for."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

REFUSAL = (
    "kernelwright is installed editable only: its top-level packages (agents, traces, ...) "
    "would collide with other distributions'. Clone it and run `make run`, or `pip install -e .`"
)


class NoWheel(bdist_wheel):
    def run(self) -> None:
        raise SystemExit(REFUSAL)


class NoSdist(sdist):
    def run(self) -> None:
        raise SystemExit(REFUSAL)


setup(cmdclass={"bdist_wheel": NoWheel, "sdist": NoSdist})
