"""What a person is told where verification refuses: what was compared, what was not, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from eqfuse.errors import VerificationError
from eqfuse.verify.certificate import Certificate

AS_WRITTEN = 'prefer="multi_pass" compiles the program as it is written, from which nothing was derived'
UNVERIFIED = "verify=False compiles it unverified: compare it with eq.reference(source) on inputs of your own"
REPORT = "eq.reference(source) on these inputs tells which of both is right: please report the program"
KNOWN = "give numbers that are known when compiling (scalars={...}, k: axis[8]): inputs are drawn for them"
FEWER = "ask for gradients of fewer inputs: those that need none are not differentiated"
BY_HAND = "eq.grad(source) is the gradient's text: edit it, and eq.certify_gradient(source, text) checks it"

MORE = "give it more, as EQFUSE_VERIFY_MB=8192 or EQFUSE_VERIFY_SECONDS=600, or pass verify=False"
TRUST = 'or allow="untaken" takes all such sides on trust'
"""Where a limit ended the trials, and where they took no side of a branch: the reason says the rest."""


def refused(what: str, certificate: Certificate, *, gradient: bool = False) -> VerificationError:
    """The error for a certificate that is not `ok`. What is said of the numbers is the certificate's."""
    shown = certificate.counterexample
    ways = (
        (FEWER, BY_HAND, UNVERIFIED)
        if gradient
        else (AS_WRITTEN, UNVERIFIED, KNOWN if shown is None else REPORT)
    )
    lines = [] if shown is None else [str(shown)]
    lines += _counts(certificate)
    lines += ["what you can do:", *(f"  - {way}" for way in ways)]
    message = f"{what} was not verified: {certificate.reason}"
    return VerificationError(message, hint="\n".join(lines), certificate=certificate)


def _counts(certificate: Certificate) -> Sequence[str]:
    """What was compared of every stage, and what was not."""
    return [f"compared: {str(stage).splitlines()[0]}" for stage in certificate.stages]
