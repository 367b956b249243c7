"""The few PTX instructions of gpu/marlin_few.py, executed on a CPU for the 32 threads of a warp, as the PTX ISA defines them.

    run(text, {"$16": words, ...})     registers by name: arrays of 32 numbers; returns all registers
"""

import re

import numpy as np


def _bf16(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def _round_bf16(x):
    """fp32 -> the bits of the nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _fma_pair(a, b, c):
    halves = [_round_bf16(_bf16((a >> s) & 0xFFFF).astype(np.float64) * _bf16((b >> s) & 0xFFFF) + _bf16((c >> s) & 0xFFFF))
              for s in (0, 16)]  # fmt: skip
    return (halves[0] | (halves[1] << 16)).astype(np.uint32)


def _mma(a, b, c):
    """m16n8k16: a four, b two, c four registers of 32 threads; thread 4 g + t."""
    thread = np.arange(32)
    g, t = thread // 4, thread % 4
    rows, columns, out = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for half in (0, 1):
        for register, (row, k) in enumerate([(g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8)]):
            rows[row, k + half] = _bf16((a[register] >> (16 * half)) & 0xFFFF)
        for register, k in enumerate([2 * t, 2 * t + 8]):
            columns[k + half, g] = _bf16((b[register] >> (16 * half)) & 0xFFFF)
    places = [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]
    for register, place in enumerate(places):
        out[place] = c[register]
    out += rows @ columns
    return [out[place].astype(np.float32) for place in places]


def run(text: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values = dict(registers)

    def get(word: str) -> np.ndarray:
        return np.full(32, int(word, 0), np.uint32) if word[0].isdigit() else values[word]

    lines = [line.split("//")[0].strip().rstrip(";") for line in text.splitlines()]
    for line in lines:
        if not line or line in "{}" or line.startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        if name.startswith("mma.sync"):
            c, a, b, c_in = (re.findall(r"[\w$]+", group) for group in re.findall(r"\{([^}]*)\}", rest))
            for register, value in zip(c, _mma([get(r) for r in a], [get(r) for r in b], [get(r) for r in c_in])):
                values[register] = value
            continue
        words = re.findall(r"[\w$]+", rest)
        if name == "mov.b32" and rest.startswith("{"):
            values[words[0]], values[words[1]] = get(words[2]) & 0xFFFF, get(words[2]) >> 16
        elif name == "mov.b32" and "{" in rest:
            values[words[0]] = get(words[1]) | (get(words[2]) << 16)
        elif name in ("mov.b32", "mov.f32"):
            values[words[0]] = get(words[1])
        elif name == "and.b32":
            values[words[0]] = get(words[1]) & get(words[2])
        elif name == "shl.b32":
            values[words[0]] = get(words[1]) << int(words[2])
        elif name == "shf.r.wrap.b32":  # the low word of (c:a) >> n
            n = int(words[3])
            values[words[0]] = (get(words[1]) >> n) | (get(words[2]) << (32 - n))
        elif name == "lop3.b32" and words[4] == "0xEA":  # (a & b) | c
            values[words[0]] = (get(words[1]) & get(words[2])) | get(words[3])
        elif name == "fma.rn.bf16x2":
            values[words[0]] = _fma_pair(get(words[1]), get(words[2]), get(words[3]))
        else:
            raise NotImplementedError(line)
    return values
