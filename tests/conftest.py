"""The suite needs no network and shares its cores with nobody: one thread, no hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from types import SimpleNamespace

import pytest
import torch

from anypo import cli

torch.set_num_threads(1)


@pytest.fixture
def anypo(monkeypatch, capfd):
    """The command line as a function, run in this process: (arguments) -> returncode, stdout, stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["anypo", *map(str, arguments)])
        monkeypatch.setattr(cli, "debugging", False)
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run
