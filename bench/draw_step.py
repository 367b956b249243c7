"""Draws assets/step.svg: the way of the data through one step, for the README, in light and in dark.

    python bench/draw_step.py
"""

from pathlib import Path

OUT = Path(__file__).parent.parent / "assets" / "step.svg"
STYLE = """
  text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; fill: #1f2328 }
  .small { font-size: 11px; fill: #57606a }
  .box { fill: #f6f8fa; stroke: #57606a; stroke-width: 1.2 }
  .base { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.6 }
  .adapter { fill: #fff8c5; stroke: #9a6700; stroke-width: 1.6 }
  .noise { fill: #ffebe9; stroke: #cf222e; stroke-width: 1.2 }
  .arrow { stroke: #57606a; stroke-width: 1.4; fill: none; marker-end: url(#head) }
  .read { stroke: #0969da; stroke-width: 1.4; stroke-dasharray: 4 3; fill: none; marker-end: url(#blue) }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .box { fill: #161b22; stroke: #9198a1 } .base { fill: #0c2d6b; stroke: #58a6ff }
    .adapter { fill: #3b2e00; stroke: #d29922 } .noise { fill: #490202; stroke: #f85149 }
    .arrow { stroke: #9198a1 } .read { stroke: #58a6ff }
  }
"""
TOP, BASE_Y = 30, 190
STAGES = (  # title, second line, x, width, class
    ("prompts", "problems/", 20, 90, "box"),
    ("rollout", "rollout.py", 190, 120, "box"),
    ("rewards", "grading/", 370, 100, "box"),
    ("advantages", "grpo.py", 520, 110, "box"),
    ("log-probs, loss", "logps.py grpo.py", 680, 150, "box"),
    ("AdamW", "training/", 880, 90, "box"),
)


def box(x: int, y: int, width: int, height: int, kind: str, title: str, note: str) -> str:
    middle = x + width / 2
    return (f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>'
            f'<text x="{middle}" y="{y + height / 2 - 2}" text-anchor="middle">{title}</text>'
            f'<text class="small" x="{middle}" y="{y + height / 2 + 14}" text-anchor="middle">{note}</text>')


def arrow(kind: str, *points: tuple[float, float]) -> str:
    return f'<path class="{kind}" d="M' + " L".join(f"{x} {y}" for x, y in points) + '"/>'


def draw() -> str:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 990 330" role="img" '
             f'aria-label="One step of nanoQeRL"><style>{STYLE}</style><defs>']
    for name, colour in (("head", "#808890"), ("blue", "#388bfd")):
        parts.append(f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                     f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>')
    parts.append("</defs>")
    for title, note, x, width, kind in STAGES:
        parts.append(box(x, TOP, width, 54, kind, title, note))
    for (_, _, x, width, _), (_, _, after, _, _) in zip(STAGES, STAGES[1:]):
        parts.append(arrow("arrow", (x + width, TOP + 27), (after - 3, TOP + 27)))
    parts += [
        box(190, BASE_Y - 70, 120, 44, "noise", "noisy norms", "aqn.py  w + Z"),
        arrow("arrow", (250, BASE_Y - 70), (250, TOP + 57)),
        box(330, BASE_Y, 330, 60, "base", "frozen base, NVFP4, one copy", "nvfp4.py marlin_kernel.py model.py"),
        box(710, BASE_Y, 180, 60, "adapter", "LoRA adapter, fp32", "lora.py"),
        arrow("read", (330, BASE_Y + 20), (150, BASE_Y + 20), (150, TOP + 40), (187, TOP + 40)),
        arrow("read", (600, BASE_Y), (600, BASE_Y - 50), (720, BASE_Y - 50), (720, TOP + 57)),
        arrow("read", (780, BASE_Y), (780, TOP + 57)),
        arrow("arrow", (925, TOP + 54), (925, BASE_Y + 30), (893, BASE_Y + 30)),
        arrow("read", (800, BASE_Y + 60), (800, BASE_Y + 90), (135, BASE_Y + 90), (135, TOP + 30), (187, TOP + 30)),
        f'<text class="small" x="165" y="{BASE_Y + 36}">sampler and trainer</text>',
        f'<text class="small" x="165" y="{BASE_Y + 50}">read the same bits</text>',
        f'<text class="small" x="250" y="{BASE_Y + 84}">the adapter is never merged: the next rollout reads what '
        "the optimiser just wrote</text>",
        f'<text class="small" x="330" y="{TOP + 95}">with the sampler\'s own log-probs:</text>',
        f'<text class="small" x="330" y="{TOP + 110}">min(pi_old / pi_rollout, 2) weighs a token</text>',
        "</svg>",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(draw() + "\n")
    print(OUT)
