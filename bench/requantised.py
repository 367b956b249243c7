"""Does an adapter survive being merged and rounded to 4 bits again? Its size beside the weights, and pass@1 either way.

    python bench/requantised.py --model tiny --adapter runs/main-0/adapter --data arithmetic        half a minute on a CPU core

Three evaluations on the same problems: the base, the adapter beside the 4-bit base (as it was trained), and the merged
model rounded to NVFP4 again.  Writes bench/results/requantised.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # bench/ itself has files named as modules are
import eval as evaluation  # noqa: E402
from convert.loader import load_model  # noqa: E402
from convert.merge import merge  # noqa: E402
from lora import adapter_pairs, load_adapter, lora_layers  # noqa: E402

RESULT = Path(__file__).resolve().parent / "results" / "requantised.json"


@torch.no_grad()
def sizes(model: str, adapter: str) -> list[float]:
    """|alpha/R B A| / |W| of every adapted matrix, W as it is after rounding (Frobenius norms)."""
    loaded, *_ = load_model(model, weights="nvfp4", device="cpu")
    load_adapter(loaded, adapter)
    pairs, found = adapter_pairs(loaded), []
    for layer in lora_layers(loaded):
        for name, w in zip(layer.parts, layer.weight.dequantize(torch.float32).split(list(layer.parts.values()))):
            if (pair := pairs.get(f"{layer.path}.{name}")) is not None:
                a, b = (part.float() for part in pair)
                found.append(((b @ a).norm() * layer.alpha / layer.rank / w.norm()).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--data", default="arithmetic")
    options = parser.parse_args()
    shares, data = sizes(options.model, options.adapter), ["--data", options.data, "--device", "cpu"]
    scores = evaluation.run(evaluation.parse(["--model", options.model, "--adapter", options.adapter, *data]))
    with tempfile.TemporaryDirectory() as folder:
        merge(options.model, options.adapter, f"{folder}/merged", device="cpu")
        scores += evaluation.run(evaluation.parse(["--model", f"{folder}/merged", *data]))
    found = {"model": options.model, "data": options.data, "problems": scores[0]["problems"], "matrices": len(shares),
             "adapter_over_weights": {"mean": statistics.fmean(shares), "smallest": min(shares), "largest": max(shares)},
             "pass@1": dict(zip(("base", "adapter", "merged_and_rounded"), (one["pass@1"] for one in scores))),
             "torch": torch.__version__}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
