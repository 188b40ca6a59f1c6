"""Rules of 8-bit operands outside the routed experts, and of what only some formats have."""

from __future__ import annotations

from moegraph.specs.rules import Report, Rule
from moegraph.specs.schema.spec import Spec


def dense_products_fit(spec: Spec, report: Report) -> None:
    """Projections of attention and shared experts in MXFP8: made from bf16, of widths in whole blocks, and there."""
    precision, model = spec.precision, spec.model
    shared = model.moe.shared if model.moe is not None else None
    heads = {"queries": model.attention.num_heads, "keys": model.num_kv_heads}
    widths = {"attention": [model.d_model, *(count * model.head_dim for count in heads.values())]}
    if model.moe is not None and shared is not None:
        widths["shared"] = [model.d_model, shared.num_experts * (shared.d_ff or model.moe.d_ff)]
    for part, word in (("shared", precision.mxfp8.shared), ("attention", precision.mxfp8.attention)):
        path = f"precision.mxfp8.{part}"
        if word == "off":
            continue
        if precision.compute != "bf16":
            message = f"needs compute bf16, and precision.compute is {precision.compute}"
            report.add(path, message, allowed="off", fix="add precision.compute=bf16, or use off")
        if part not in widths:
            report.add(path, "has no effect in a model without shared experts", allowed="off")
        elif word == "on" and any(width % 32 for width in widths[part]):
            text = ", ".join(map(str, dict.fromkeys(widths[part])))
            report.add(path, f"needs widths of whole blocks of 32, and they are {text}", allowed="auto | off")
        if precision.fp8 != "off":
            message = f"and {path} are both on: one is a format of Hopper, the other of Blackwell"
            report.add("precision.fp8", message, fix="use one of them")


def weight_gradients_exist(spec: Spec, report: Report) -> None:
    """Weight gradients in MXFP8 are those of parts of the model that are cast."""
    mxfp8 = spec.precision.mxfp8
    if mxfp8.wgrad != "bf16" and not mxfp8.parts:
        message = "has no effect with precision.mxfp8.experts, shared and attention off"
        report.add("precision.mxfp8.wgrad", message, allowed="bf16", fix="add precision.mxfp8.experts=on or auto")


def blocks_fit(spec: Spec, report: Report) -> None:
    """FP8 with scales in blocks of 128: every contraction has whole ones, and weight gradients have no such form."""
    precision, moe = spec.precision, spec.model.moe
    if precision.fp8 != "blockwise":
        return
    if moe is not None and (spec.model.d_model % 128 or moe.d_ff % 128):
        message = f"needs widths of whole blocks of 128, and they are {spec.model.d_model} and {moe.d_ff}"
        report.add("precision.fp8", message, allowed="off | rowwise")
    if precision.fp8_wgrad:
        message = "scales in blocks have no weight gradient in FP8: its contraction is over rows"
        report.add("precision.fp8_wgrad", message, allowed="false", fix="remove it, or use precision.fp8=rowwise")


RULES: tuple[Rule, ...] = (dense_products_fit, weight_gradients_exist, blocks_fit)
