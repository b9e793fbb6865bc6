"""The HTML report of `verify`: one file without a network, made from the same facts as the terminal's table and the JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from converter.display import duration, layout_text, ranges, size
from mappings.names import fold_names, number_free
from model.report_plots import HEIGHT, LEFT, RIGHT, TOP, layer_plots, tensor_errors, tensor_plots
from model.verify_display import number

WORST = 10


def render_report(facts: dict[str, Any]) -> str:
    """The report as HTML. Everything in `facts` is escaped: names come from strangers' files."""
    environment = Environment(
        loader=PackageLoader("model"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": size, "duration": duration, "number": number, "percent": lambda share: f"{100 * float(share):.4g} %"}
    forward = facts["forward"]
    return environment.get_template("report.html").render(
        facts=facts,
        name=PurePath(facts["source"]["path"]).name or facts["source"]["path"],
        target=PurePath(facts["target"]["path"]).name or facts["target"]["path"],
        layout="one file with whole parameters" if facts["target"]["layout"] is None else layout_text(facts["target"]["layout"]),
        model=model_rows(facts["model"], facts["target"]["layout"]),
        forward=forward,
        layer_plots=layer_plots(forward) if forward is not None else [],
        tensor_plots=tensor_plots(facts["weights"]),
        differing=sum(error > 0 for _, error, _ in tensor_errors(facts["weights"])),
        worst_tensors=worst_tensors(facts["weights"]["differences"]),
        worst_states=sorted(forward["states"], key=lambda state: -float(state["relative_error"]))[:WORST] if forward is not None else [],
        coverage=coverage_rows(facts["weights"]["fates"]),
        frame={"height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP},
    )


def worst_tensors(differences: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ten slices that are furthest off; a missing one before all others."""

    def error(item: dict[str, Any]) -> float:
        return float("inf") if item["max_relative_error"] is None else float(item["max_relative_error"])

    return sorted(differences, key=lambda item: -error(item))[:WORST]


def coverage_rows(fates: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """What became of each source tensor, layers folded: HF name, fate, parameters or reason."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for fate in fates:
        alike = (number_free(fate["name"]), fate["fate"], *(number_free(name) for name in fate["parameters"]), number_free(fate["reason"]))
        groups[alike].append(fate)
    rows = []
    for group in groups.values():
        names = [name for fate in group for name in fate["parameters"]]
        became = ", ".join(fold_names(names)) or group[0]["reason"]
        rows.append({"name": ", ".join(fold_names(fate["name"] for fate in group)), "fate": group[0]["fate"], "became": became})
    return rows


def model_rows(model: dict[str, Any], layout: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The model as a person describes it."""
    heads = f"{model['heads']}" + (f", {model['kv_heads']} KV heads" if model["kv_heads"] != model["heads"] else "")
    padded = layout["padded_vocab"] if layout is not None else model["vocab"]
    vocabulary = f"{model['vocab']:,}" + (f", padded to {padded:,}" if padded != model["vocab"] else "")
    gated = ", gated" if model["gated_mlp"] else ""
    rows = [
        ("Kind", f"{model['kind']}, {model['layers']} layers"),
        ("Hidden", f"{model['hidden']:,}, feed-forward {model['ffn']:,}"),
        ("Heads", f"{heads}, {model['head_dim']} wide"),
        ("Vocabulary", vocabulary + (", tied embeddings" if model["tied"] else "")),
        ("Positions", _positions(model)),
        ("Norm", f"{model['norm'].replace('_', ' ')}, {model['norm_position']}-norm, eps {model['norm_eps']:g}"),
        ("Activation", model["activation"].replace("_", " ") + gated),
    ]
    if model["sliding_layers"]:
        rows.append(("Sliding window", f"{model['sliding_window']:,} in layers {ranges(sorted(model['sliding_layers']))}"))
    return rows


def _positions(model: dict[str, Any]) -> str:
    text = f"{model['max_positions']:,}, {model['positions'].replace('rope', 'rotary')}"
    rope = model["rope"]
    if rope is not None:
        text += f", theta {rope['theta']:,.0f}"
        if rope["scaling"] is not None:
            text += f", {rope['scaling']['kind']} scaling by {rope['scaling']['factor']:g}"
    return text
