"""The reading order of the modules with their line counts, as README.md shows it.

    python bench/code_map.py            prints the table
    python bench/code_map.py --write    puts it between the markers in README.md (a test compares the two)
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- code map -->", "<!-- end of code map -->"
ORDER = (  # the question that each file answers, in the order in which a reader may take them
    ("nvfp4", "What is a 4-bit float weight, and how is one made?"),
    ("lora", "How does a frozen weight learn, and what does its backward look like?"),
    ("aqn", "Where does the noise enter, and how much of it is there?"),
    ("grpo", "How do rewards become a loss?"),
    ("logps", "How are log-probs of 152k-token vocabularies had without holding the logits?"),
    ("train", "How does one step go, from prompts to the saved adapter?"),
    ("model", "What is the transformer, for training and for decoding alike?"),
    ("rollout", "How are many completions sampled at once, without an inference engine?"),
    ("sampling", "How is a token drawn so that it depends on nothing around it?"),
    ("marlin_kernel", "How does a GPU multiply by packed 4-bit weights?"),
    ("eval", "How good is the result, and how sure are we?"),
)


PACKAGES = (  # what a real run needs besides, from the paper's idea outwards
    ("layers", "What is the transformer made of?"),
    ("decoding", "What happens between two tokens?"),
    ("gpu", "What runs on the GPU besides the GEMM's front door?"),
    ("problems", "What is asked?"),
    ("grading", "Is it right?"),
    ("training", "How do settings, batches, ranks and logs fit around the loss?"),
    ("files", "What lies on disk, and how far can it be trusted?"),
    ("convert", "How does a checkpoint become a model, and a model a checkpoint?"),
)


def line_count(name: str) -> int:
    return len((ROOT / f"{name}.py").read_text().splitlines())


def listed(package: str) -> list[str]:
    """The package's modules in its reading order, as its docstring lists them."""
    return re.findall(r"^    (\w+)\.py  ", (ROOT / package / "__init__.py").read_text(), re.MULTILINE)


def table() -> str:
    core = sum(line_count(name) for name, _ in ORDER)
    rows = [f"| {i} | [`{name}.py`]({name}.py) | {line_count(name)} | {question} |"
            for i, (name, question) in enumerate(ORDER, 1)]
    package_rows, total = [], core
    for package, question in PACKAGES:
        counts = {name: line_count(f"{package}/{name}") for name in listed(package)}
        files = " · ".join(f"[`{name}`]({package}/{name}.py) {count}" for name, count in counts.items())
        package_rows.append(f"| [`{package}/`]({package}/__init__.py) | {sum(counts.values()):,} | {question} | {files} |")
        total += sum(counts.values())
    between = (f"That is the method, {core:,} lines. What it stands on, {total - core:,} lines more; the files of a package in "
               "the order in which to read them:")
    return "\n".join(["| | file | lines | the question it answers |", "|---|---|---|---|", *rows, "", between, "",
                      "| package | lines | question | files |", "|---|---|---|---|", *package_rows])


def in_readme() -> str:
    text = (ROOT / "README.md").read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    readme.write_text(f"{text[:start]}\n{table()}\n{text[end:]}")


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    print(table())
