"""What the doctor says of the sandbox."""

from surefit.core import jail
from surefit.core.errors import MachineError
from surefit.doctor import sandbox
from surefit.doctor.probes import GROUPS


def test_it_is_one_of_the_probes():
    assert sandbox.sandbox_probes in GROUPS


def test_a_working_sandbox_is_named(monkeypatch):
    monkeypatch.setattr(sandbox, "find_working_sandbox", lambda: "bwrap")
    (probe,) = sandbox.sandbox_probes()
    assert (probe.verdict, probe.fact.split(",")[0]) == ("ok", "bubblewrap")


def test_without_one_the_fix_is_the_errors_help(monkeypatch):
    def refused() -> jail.SandboxKind:
        raise MachineError("new namespaces: Operation not permitted", help="install bubblewrap")

    monkeypatch.setattr(sandbox, "find_working_sandbox", refused)
    (probe,) = sandbox.sandbox_probes()
    assert probe.verdict == "warn"
    assert "Operation not permitted" in probe.fact
    assert probe.fix == "install bubblewrap"
