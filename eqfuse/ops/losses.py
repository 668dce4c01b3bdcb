"""Losses over vocabularies, of preferences and policies, of teachers and of pairs. None of them stores logits that it makes itself."""

from __future__ import annotations

from eqfuse.errors import EqfuseError
from eqfuse.ops.program import op

REDUCTIONS = ("mean", "sum", "none")


def _logits(given: frozenset[str], soft_cap: float | None, temperature: float = 1.0) -> str:
    """The lines that define z[t,v], from logits or from a linear layer without them."""
    value = "logits[t,v]"
    if "w" in given:
        value = "sum[c](x[t,c] * w[v,c])" + (" + bias[v]" if "bias" in given else "")
    if temperature != 1.0:
        value = f"({value}) / {temperature!r}"
    if soft_cap is not None:
        value = f"{soft_cap!r} * tanh(({value}) / {soft_cap!r})"
    return f"z[t,v] = {value}"


@op("logits", "label")
def cross_entropy(
    given: frozenset[str],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    dtype: str | None = None,
) -> str:
    """The cross-entropy of logits: [tokens, vocabulary] with labels: [tokens], of integers. Labels of `ignore_index` count for nothing; `z_loss` times
    the square of the log-sum-exp is added (Chowdhery and others, 2022); logits are capped at `soft_cap` by a tanh (Gemma 2). The loss has the `dtype`
    of the language, "f32" for instance, or that of the tensors."""
    if reduction not in REDUCTIONS:
        raise EqfuseError(f"reduction is {reduction!r}", hint=f"choose one of {', '.join(REDUCTIONS)}")
    own = "L[t] - where(valid[t], z[t,label[t]], 0)"
    if label_smoothing:
        own = f"{1 - label_smoothing!r} * ({own}) + {label_smoothing!r} * (L[t] - mean[v](z[t,v]))"
    if z_loss:
        own += f" + {z_loss!r} * sq(L[t])"
    total = "sum[t](each[t])"
    last = {
        "none": "return each",
        "sum": f"loss = {total}\nreturn loss",
        "mean": f"loss = {total} / max(sum[t](where(valid[t], 1, 0)), 1)\nreturn loss",
    }
    made = "each: {}[t]" if reduction == "none" else "loss: {}"
    declared = "" if dtype is None else made.format(dtype)
    return f"""{declared}
valid[t] = label[t] != {ignore_index}
{_logits(given, soft_cap)}
L[t] = logsumexp[v](z[t,v])
each[t] = where(valid[t], {own}, 0)
{last[reduction]}"""


@op("x", "w", "label", "bias")
def linear_cross_entropy(
    given: frozenset[str],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
    dtype: str | None = None,
) -> str:
    """The same of the logits `x wᵀ + bias`, which are not stored: x: [tokens, c], w: [vocabulary, c], bias: [vocabulary] or left out (Wijmans and
    others, 2024)."""
    return cross_entropy.write(given, ignore_index, label_smoothing, z_loss, soft_cap, reduction, dtype)


@op("logits", "ids")
def token_log_probs(
    given: frozenset[str], temperature: float = 1.0, soft_cap: float | None = None, entropy: bool = False
) -> str:
    """The log-probabilities of the tokens `ids`: [tokens] under logits: [tokens, vocabulary] / temperature; with `entropy` those of the
    distributions too."""
    lines = f"""
{_logits(given, soft_cap, temperature)}
L[t] = logsumexp[v](z[t,v])
p[t] = z[t,ids[t]] - L[t]"""
    if not entropy:
        return lines + "\nreturn p"
    return lines + "\nH[t] = L[t] - sum[v](exp(z[t,v] - L[t]) * z[t,v])\nreturn p, H"


@op("x", "w", "ids", "bias")
def linear_token_log_probs(
    given: frozenset[str], temperature: float = 1.0, soft_cap: float | None = None, entropy: bool = False
) -> str:
    """The same of the logits `x wᵀ + bias`, which are not stored: x: [tokens, c], w: [vocabulary, c]."""
    return token_log_probs.write(given, temperature, soft_cap, entropy)


@op("student", "teacher")
def distillation(
    given: frozenset[str], kind: str = "forward", temperature: float = 1.0, beta: float = 0.5
) -> str:
    """The mean divergence of a student's from a teacher's distribution, of logits: [tokens, vocabulary] / temperature, times its square: "forward"
    KL(teacher | student), "reverse" KL(student | teacher), or "jsd", Jensen-Shannon with `beta` of the teacher (Agarwal and others, 2023)."""
    kinds = {
        "forward": "sum[v](exp(q[t,v]) * (q[t,v] - p[t,v]))",
        "reverse": "sum[v](exp(p[t,v]) * (p[t,v] - q[t,v]))",
        "jsd": f"sum[v]({beta!r} * exp(q[t,v]) * (q[t,v] - log(m[t,v])) "
        f"+ {1 - beta!r} * exp(p[t,v]) * (p[t,v] - log(m[t,v])))",
    }
    if kind not in kinds:
        raise EqfuseError(f"kind is {kind!r}", hint=f"choose one of {', '.join(kinds)}")
    mixture = f"m[t,v] = {beta!r} * exp(q[t,v]) + {1 - beta!r} * exp(p[t,v])" if kind == "jsd" else ""
    return f"""
a[t,v] = student[t,v] / {temperature!r}
c[t,v] = teacher[t,v] / {temperature!r}
p[t,v] = a[t,v] - logsumexp[v](a[t,v])
q[t,v] = c[t,v] - logsumexp[v](c[t,v])
{mixture}
loss = {temperature * temperature!r} * mean[t]({kinds[kind]})
return loss"""


@op("chosen", "rejected", "reference_chosen", "reference_rejected")
def dpo(given: frozenset[str], beta: float = 0.1, label_smoothing: float = 0.0) -> str:
    """Direct preference optimisation (Rafailov and others, 2023), of the summed log-probabilities of answers: [pairs] under the policy and under the
    reference; with `label_smoothing` conservative."""
    return f"""
margin[b] = {beta!r} * (chosen[b] - rejected[b] - (reference_chosen[b] - reference_rejected[b]))
loss = mean[b]({1 - label_smoothing!r} * softplus(-margin[b]) + {label_smoothing!r} * softplus(margin[b]))
return loss"""


@op("log_probs", "reference", "desirable", "divergence")
def kto(
    given: frozenset[str], beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> str:
    """Kahneman-Tversky optimisation (Ethayarajh and others, 2024), of the summed log-probabilities of answers: [answers] and of the reference, of whether
    each is desirable (1 or 0), and of `divergence`: [1], an estimate of the policy's KL divergence, which has no gradient."""
    return f"""
r[b] = {beta!r} * (log_probs[b] - reference[b] - max(stop(divergence[0]), 0))
loss = mean[b](where(desirable[b] > 0, {desirable_weight!r} * sigmoid(-r[b]), {undesirable_weight!r} * sigmoid(r[b])))
return loss"""


@op("log_probs", "old", "advantage", "mask", "reference")
def grpo(
    given: frozenset[str], low: float = 0.2, high: float = 0.2, beta: float = 0.0, per: str = "token"
) -> str:
    """Group-relative policy optimisation (Shao and others, 2024): log-probabilities of tokens: [answers, tokens], those of the policy that sampled them
    (`old`), the advantage: [answers] of each, and `mask`: 1 where a token counts. Ratios are clipped to [1 - low, 1 + high]; `beta` weighs the divergence
    from `reference`. The mean is over all tokens, or `per` "answer" over those of each and then over answers."""
    if beta and "reference" not in given:
        raise EqfuseError("the divergence needs a reference", hint="give reference=, or beta=0")
    divergence = ""
    if beta:
        apart = "reference[b,t] - log_probs[b,t]"
        divergence = f" + {beta!r} * (exp({apart}) - ({apart}) - 1)"
    means = {
        "token": "loss = sum[b,t](each[b,t]) / max(sum[b,t](mask[b,t]), 1)",
        "answer": "loss = mean[b](sum[t](each[b,t]) / max(sum[t](mask[b,t]), 1))",
    }
    if per not in means:
        raise EqfuseError(f"per is {per!r}", hint=f"choose one of {', '.join(means)}")
    return f"""
ratio[b,t] = exp(log_probs[b,t] - old[b,t])
gain[b,t] = min(ratio[b,t] * advantage[b], clip(ratio[b,t], {1 - low!r}, {1 + high!r}) * advantage[b])
each[b,t] = (-gain[b,t]{divergence}) * mask[b,t]
{means[per]}
return loss"""


@op("x", "y")
def contrastive(given: frozenset[str], temperature: float = 0.07, symmetric: bool = True) -> str:
    """InfoNCE of pairs of vectors, x and y: [pairs, c], each against all others (van den Oord and others, 2018); `symmetric` takes the mean of both
    directions, as CLIP does (Radford and others, 2021). Scores are not stored."""
    lines = f"""
s[i,j] = sum[c](x[i,c] * y[j,c]) / {temperature!r}
own[i] = sum[c](x[i,c] * y[i,c]) / {temperature!r}
one = mean[i](logsumexp[j](s[i,j]) - own[i])"""
    if not symmetric:
        return "j: axis[i]" + lines + "\nreturn one"
    return (
        "j: axis[i]"
        + lines
        + """
other = mean[j](logsumexp[i](s[i,j]) - own[j])
loss = (one + other) / 2
return loss"""
    )
