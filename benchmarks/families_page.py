"""docs/models.md from the lines of families.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from family_shapes import IMAGES

Line = Mapping[str, Any]
HEAD = """# Which models

Every decoder that transformers knows was built at a small size from its own config class, with a few thousand random
parameters, and taken through every stage: `check`, the plan by closed form and by simulation, two training steps, with
LoRA and of all weights, padded (interrupted after the first step, and resumed) and packed, the merge and its
certificate, reading the results back with plain transformers and plain PEFT (the same logits, and an answer), and
`evaluate`. This shows that the stages work with the family's code. It says nothing about how well a model learns.

    python benchmarks/families.py --page docs/models.md

"""
EXPERTS = """
## Experts

transformers 5 holds the experts of a layer in stacks (`mlp.experts.gate_up_proj`), which are not linear layers. So
`target_modules: all-linear` adds LoRA factors to attention, and to the MLPs of layers without experts where PEFT allows
it, but to no expert. ADP007 says what share of the parameters that leaves out.

    lora: {experts: true}

also adds factors to every routed expert, with the same rank and alpha, through PEFT's `target_parameters`; routers are
left as they are. `experts: with_router` adds factors to the routers as well, so that the routing of tokens can change;
51 of the 55 families with stacks of experts have routers that allow it (not AFMoE, HunYuan, LongCat-Flash and Zaya),
and in a full fine-tune routers are trained like everything else. PEFT reads such an adapter without SureFit, and gives
the same answers; SureFit merges those that PEFT wrote. In a merge every tensor of the base's files gets its own update,
whether the files hold the experts in stacks or one by one, and is written under the same name; if an expert's factors
are missing, the merge is refused and names the expert.

This is not part of all-linear, because it costs far more. Qwen3-30B-A3B with r = 16 has 13,369,344 trained parameters
without the experts and 642,514,944 with them. And PEFT adds the factors to the weights at every call: it computes
W + scaling · B A for whole stacks, including experts that no token was routed to. A training step holds these sums, and
the gradient of one: 1.875 GiB for Qwen3-30B-A3B in bfloat16 with gradient checkpointing; without it, the size of all
experts once more. The plan counts both. Generating with an unmerged adapter pays the same for every token: merge first.

It cannot be combined with dropout, DoRA, quantised weights, compiled layers or any `parallel.mode` but single and ddp
(ADP009). An expert that no token was routed to in training keeps a B of zeros, and is unchanged.

`python benchmarks/families.py --experts`, 23 November 2026, took 53 mixtures through every stage except those of a full
fine-tune. 29 passed, and 17 passed except for packing, which `check` refuses for them without experts too. The other
five were tried again on 24 November: Laguna and LongCat-Flash pass, DeepSeek-V4 and Zaya pass except for packing, and
`check` refuses Inkling 2 (ADP009), whose files interleave the rows of gate and up, which no merge restores. It also
refuses JetMoE, whose experts are of another kind.

PEFT reads old adapters of such models by translating names: in the types that ADP008 knows, `gate_proj`, `up_proj` and
`down_proj` (or `w1`, `w2`, `w3`) mean the stacks wherever they occur. Shared experts and dense layers of those models
have linear layers with these names. SureFit trains no factors there, because no adapter file could express them.

## What all-linear reaches

All linear layers except: the output head; routers; the shared experts and dense layers just named; layers for images
and sound, and indexers that select keys, which learn nothing from text; `dt_proj`, and `correction_coefs` of Gemma 3n,
whose weight is read without calling the layer; `out_proj` of Mamba, Falcon H1 and Nemotron H, which PEFT refuses;
Laguna's shared experts (with its dense MLPs) and Inkling 2's `weight_proj`, whose factors PEFT drops when it reads an
adapter; and the block that several layers of a Zamba share, because one matrix cannot hold each layer's factors. A list
of names in `target_modules` reaches none of these either.
"""
WITH_IMAGES = """
## Models that also take images

A checkpoint with its vision part can be fine-tuned on text. If transformers has a class for the language model alone
(Llama 4, Qwen3.5), that is loaded and trained, and the vision part stays on disk. Otherwise (Gemma 3, Mistral 3,
Qwen-VL, ...) the whole model is loaded, its memory is in the plan, and its vision part is frozen with LoRA and gets no
gradient in a full fine-tune. Either way the whole checkpoint is saved, after a merge and after a full fine-tune: every
tensor of the base, those of the vision part bit for bit, config.json with `vision_config` and the class of the base,
and the files for image preprocessing. Every transformers class that reads the base reads the result, with the same
logits (compared in *reload* and *full merge*). PEFT reads the adapter on the class that was loaded:
`AutoModelForCausalLM`, or `AutoModelForImageTextToText` for types that the first does not know. For a server,
`surefit export --format adapter` writes the names of the whole checkpoint: vLLM always loads the whole model, and where
no module has a name in the adapter, it silently serves the base (vllm-project/vllm#34186). PEFT loads such an adapter
on `AutoModelForImageTextToText`. Rows with images are refused.

"""


def page(lines: Iterable[Line], cells: tuple[str, ...], known: Iterable[str], other: Iterable[Line] = ()) -> str:
    """The whole page.

    Args:
        lines: one per family.
        cells: the columns.
        known: every family there is.
        other: lines of a whole run with other versions.
    """
    by_name = {line["family"]: line for line in lines}
    elsewhere = {line["family"]: line for line in other}
    whole = [by_name[name] for name in known if name.endswith(IMAGES) and name in by_name]
    known = [name for name in known if not name.endswith(IMAGES)]
    tried = [by_name[name] for name in known if name in by_name]
    decoders = _decoders(tried)
    text = HEAD + (
        f"The installed transformers lists {len(known)} families; {len(tried)} were measured, with {_versions(tried)}. "
        f"transformers itself does not train {sum(bool(line['transformers']) for line in tried)} of these in this form "
        f"(listed at the end), and {sum(map(_encoder, tried))} are encoders or encoder-decoders, which `check` refuses "
        f"(MOD001). Of the other {len(decoders)}:\n\n"
    )
    text += _standings(decoders, _decoders(line for line in elsewhere.values() if not line["family"].endswith(IMAGES)))
    text += _differences([*tried, *whole], elsewhere) + _times([*tried, *whole])
    text += EXPERTS + "\n## Family by family\n\n"
    text += "✓: passes; a code: refused by `check` under this rule; **fault**: see below; blank: not reached.\n\n"
    text += _table(decoders, cells) + WITH_IMAGES + _table(whole, cells)
    text += "\n## Faults\n\n" + ("".join(_faults([*decoders, *whole])) or "None.\n")
    text += "\n## Not decoders\n\n" + ", ".join(line["family"] for line in tried if _encoder(line)) + ".\n"
    text += "\n## Not trained by transformers itself\n\nBuilt as above; a real checkpoint may do better.\n\n"
    failed = [line for line in [*tried, *whole] if line["transformers"]]
    text += "".join(f"- {line['family']}: {_plain(line['transformers'])}\n" for line in failed)
    if missing := [name for name in known if name not in by_name]:
        text += f"\n## Not measured\n\n{', '.join(missing)}.\n"
    return text


def _decoders(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if not line["transformers"] and not _encoder(line)]


def _versions(lines: Iterable[Line]) -> str:
    return "; ".join(sorted({line["with"] for line in lines}))


def _standings(decoders: list[Line], elsewhere: list[Line]) -> str:
    """How many pass, in a column for each set of versions."""
    runs = [each for each in (decoders, elsewhere) if each]
    counts = [Counter(map(standing, each)) for each in runs]
    text = f"| | {' | '.join(map(_versions, runs))} |\n|{' --- |' * (len(runs) + 1)}\n"
    for state, words in STANDINGS.items():
        cells = [f"{count[state]} ({count[state] / len(run):.0%})" for count, run in zip(counts, runs, strict=True)]
        text += f"| {words} | {' | '.join(cells)} |\n"
    return text


def _differences(lines: list[Line], elsewhere: Mapping[str, Line]) -> str:
    """What is different with the other versions, in a list."""
    if not elsewhere:
        return ""
    both = [(line, elsewhere[line["family"]]) for line in lines if line["family"] in elsewhere]
    names = [line["family"] for line in lines if line["family"] not in elsewhere]
    text = f"\nWith {_versions(elsewhere.values())}, {len(both)} of these families were measured"
    text += f"; these are missing there: {', '.join(names)}." if names else "."
    said = [f"- {one['family']}: {change}\n" for one, two in both if (change := _change(one, two))]
    return text + (" What differs there:\n\n" + "".join(said) if said else " Everything else is the same there.\n")


def _change(one: Line, two: Line) -> str:
    """What of the second line differs from the first, in words."""
    if bool(one["transformers"]) != bool(two["transformers"]):
        why = two["transformers"] or "made and trained by transformers"
        return _plain(why)
    cells = {name: (_cell(one["cells"].get(name)), _cell(cell)) for name, cell in two["cells"].items()}
    return ", ".join(f"{name} {now}" for name, (before, now) in cells.items() if before != now)


def _times(lines: list[Line]) -> str:
    if not lines:
        return ""
    longest = max(lines, key=lambda line: line["seconds"])
    middle = median(line["seconds"] for line in lines)
    return (
        f"\nA family takes {middle:.0f} s (median), and {longest['family']} {longest['seconds']:.0f} s (the longest), "
        "on one core shared with other processes.\n"
    )


def _table(lines: Iterable[Line], cells: tuple[str, ...]) -> str:
    text = f"| family | {' | '.join(cells)} |\n|{' --- |' * (len(cells) + 1)}\n"
    for line in lines:
        name = line["family"].removesuffix(IMAGES)
        text += f"| {name} | {' | '.join(_cell(line['cells'].get(cell)) for cell in cells)} |\n"
    return text


STANDINGS = {
    "all": "pass every stage",
    "unpacked": "pass every stage, and `check` refuses to pack them",
    "refused": "refused by `check`",
    "fault": "have a fault",
}


def standing(line: Line) -> str:
    """A key of `STANDINGS`."""
    states = {name: cell["state"] for name, cell in line["cells"].items()}
    if "fault" in states.values():
        return "fault"
    refused = {name for name, state in states.items() if state == "refused"}
    if not refused:
        return "all"
    return "unpacked" if all("packed" in name for name in refused) else "refused"


def _encoder(line: Line) -> bool:
    cell = line["cells"].get("lora", {})
    return cell.get("rule") == "MOD001" and ("encoder" in cell["why"] or "those after it" in cell["why"])


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    return {"passes": "✓", "refused": cell.get("rule", ""), "fault": "**fault**"}[cell["state"]]


def _faults(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        first = next(((name, cell) for name, cell in line["cells"].items() if cell["state"] == "fault"), None)
        if first:
            yield f"- {line['family']}, {first[0]}: {_plain(first[1]['why'])}\n"


def _plain(text: str) -> str:
    """Without the folder of the run, and short."""
    text = re.sub(r"/\S*/(base|lora|full)\S*:? ?", "", text).replace("|", "/").replace("<", "&lt;").replace("*", "·")
    return text[:200] + ("…" if len(text) > 200 else "")
