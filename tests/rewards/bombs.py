"""Answers that were made to hang, crash or feed the grader of mathematics; none of them is right."""

import random

BOMBS = [
    "9^{9^9}",
    "9^{9^{9^{9}}}",
    "9^9^9",
    "(9^9)^9^9",
    "9**9**9",
    "{9^{999}}^{999999}",
    "2^{1000000000000}",
    "((((9^{9999})^{9999})^{9999})^{9999})",
    "(99999999+x)^{9999}",
    "100000000!",
    "((10!)!)!",
    "3!!!!!",
    "2^{99!}",
    "99^{99}!",
    "(" * 3000 + "1" + ")" * 3000,
    "(" * 200 + "1" + ")" * 200,
    "{" * 150 + "1" + "}" * 150,
    "\\sqrt{" * 60 + "2" + "}" * 60,
    "\\frac{1}{" * 40 + "2" + "}" * 40,
    "\\sum_{n=1}^{10^{10}} n",
    "\\sum_{n=1}^{9999} \\frac{1}{n^{n}}",
    "\\prod_{k=1}^{99999} k",
    "\\int_0^{1} x^{x^{x}} dx",
    "\\lim_{x \\to 0} \\frac{\\sin^{99} x}{x^{99}}",
    "\\binom{10^8}{5 \\cdot 10^7}",
    "(x+y+z+w+v)^{300}",
    "(1+x)^{9999} - (1-x)^{9999}",
    "\\sqrt[9999]{x^{9999}+1} + \\sqrt[9998]{x^{9998}+1}",
    "1" * 100_000,
    "0." + "3" * 300,
    "1+" * 5000 + "1",
    "x" * 399,
    "\\begin{pmatrix}" + " & ".join("12345") * 10 + "\\end{pmatrix}^{999}",
    "\\sin(" * 30 + "x" + ")" * 30,
    "\\boxed{" * 50 + "1" + "}" * 50,
    "}" * 100 + "{" * 100,
    "\ud800\udfff \x00 18",
    "\\" * 300,
    "__import__('os').system('true')",
    "\\lceil 10^{10^{100}} \\rceil",
    "10^{10^{10^{10}}} \\bmod 7",
    "\\gcd(10^{99999}, 2^{99999})",
    "F_{10^{18}}",
    "\\sqrt[10^{9}]{2}",
    "e^{e^{e^{e^{e^{e^{79}}}}}}",
    "\\log(\\log(9^{9^{99}}))",
    "\\frac{d^{9999}}{dx^{9999}} x^{9999}",
    "x^{9999} + x^{9998} + x^{9997} = 0",
    "\\{" + ", ".join(f"x_{{{n}}}" for n in range(60)) + "\\}",
    "\\bigcup_{n=1}^{10^9} [n, n+1]",
    "(1, 2) \\cup " * 30 + "(1, 2)",
    "|" * 200 + "x" + "|" * 200,
    "\\text{" * 80 + "x" + "}" * 80,
    "\\left(" * 100,
    "a" + "_a" * 180,
    "1/" * 150 + "1",
    "--" * 190 + "1",
    "\u0660" * 300,
    "\U0001d7d9" * 300,
    "\\begin{cases}" * 20 + "x" + "\\end{cases}" * 20,
]


def _polynomials(rng):
    a, b, c, d = (rng.randint(2, 99) for _ in range(4))
    yield f"(x+{a})^{{30}}(x+{b})^{{30}}(x+{c})^{{30}}(x+{d})^{{30}}"
    yield f"({'+'.join('abcdefgh')}+{a})^{{29}}({'+'.join('ijkl')})^{{29}}"
    yield f"(x+{a})^{{{rng.randint(14, 30)}}}(y-{b})^{{{rng.randint(14, 30)}}}"
    yield f"x^{{{rng.randint(300, 9999)}}}-{a}"
    yield f"x^{{{rng.randint(100, 300)}}}-{a}x^{{{rng.randint(50, 99)}}}+{b}"
    yield "".join(f"(x-{n + a})" for n in range(rng.randint(10, 60)))
    yield "+".join(f"\\frac{{{a + n}}}{{x+{n}}}" for n in range(rng.randint(5, 20)))
    yield f"\\frac{{x^{{{a + 100}}}-1}}{{x^{{{b}}}-1}}"


def _roots(rng):
    a, b = rng.randint(2, 999), rng.randint(100, 9999)
    yield f"\\sqrt{{2^{{{b}}}+{a}}}"
    yield f"\\sqrt[{rng.randint(2, 99)}]{{3^{{{b}}}+{a}}}"
    yield "\\sqrt{" + "".join(f"{a + n}+\\sqrt{{" for n in range(rng.randint(3, 12))) + "2" + "}" * 40
    yield "\\sqrt{" * (n := rng.randint(4, 10)) + f"{a}" + "}" * n
    yield "+".join(f"\\sqrt{{{a + n}}}" for n in range(rng.randint(5, 40)))
    yield "".join(f"(\\sqrt{{{a + n}}}+{n})" for n in range(rng.randint(4, 30)))
    yield "\\frac{1}{" + "+".join(f"\\sqrt{{{a + 2 * n}}}" for n in range(rng.randint(3, 12))) + "}"
    yield "".join(f"(1+\\sqrt[{n + 3}]{{{a}}})^{{9}}" for n in range(rng.randint(2, 9)))


def _powers(rng):
    a, b, c = rng.randint(2, 9), rng.randint(100, 9999), rng.randint(2, 99)
    yield f"{a}^{{{b}^{{{c}}}}}"
    yield f"((((1/{a})^{b})^{b})^{b})^{c}"
    yield f"{a}^{{{b}}} + {c}^{{{b}}}"
    yield f"({a}^{{{b}}})^{{{c}}}"
    yield "\\cdot".join(f"{a + n}^{{{b}}}" for n in range(rng.randint(2, 9)))
    yield f"x^{{y^{{{a}z}}}}" * rng.randint(5, 30)
    yield f"e^{{e^{{e^{{{a}{'x' * rng.randint(0, 5)}}}}}}}"
    yield f"0.{'1' * rng.randint(1, 50)}e{b}"
    yield f"\\frac{{{a}^{{{b}}}-1}}{{{c}^{{{b}}}+1}}"


def _functions(rng):
    a, b = rng.randint(2, 999), rng.randint(100, 9999)
    inner = "\\cos(" * (n := rng.randint(2, 9)) + f"{a}x" + ")" * n
    yield inner
    yield f"{inner[:60]}^{{{rng.randint(2, 29)}}}" * rng.randint(1, 5)
    yield f"\\tan(10^{{{b}}})"
    yield f"\\sin(\\frac{{\\pi}}{{{b}}})"
    yield "+".join(f"\\cos(\\frac{{{n}\\pi}}{{{a}}})" for n in range(1, rng.randint(3, 15)))
    yield f"\\log_{{{a}}}({a + 1}^{{{b}}})"
    yield f"\\ln({a}^{{{b}}}+1)"
    yield f"\\arctan(\\tan({b}^{{{rng.randint(2, 20)}}}))"
    yield f"\\lfloor \\pi^{{{b}}} \\rfloor"
    yield f"\\sin^{{{rng.randint(20, 99)}}}({a}x)\\cos^{{{rng.randint(20, 99)}}}(x)"
    yield f"|{'|'.join(f'x-{a + n}' for n in range(rng.randint(2, 20)))}|"


def _counts(rng):
    a, b = rng.randint(2, 99), rng.randint(10**3, 10**12)
    yield f"{b}!"
    yield f"(({a}!)!)!"
    yield f"{a}{'!' * rng.randint(2, 9)}"
    yield f"\\sum_{{n=1}}^{{{b}}} \\frac{{1}}{{n^{{{a}}}}}"
    yield f"\\prod_{{k={a}}}^{{{b}}} k"
    yield f"\\int_0^{{{a}}} x^{{x^{{x}}}} dx"
    yield f"\\lim_{{x \\to 0}} \\frac{{\\sin^{{{a}}} x}}{{x^{{{a}}}}}"
    yield f"\\binom{{{b}}}{{{b // 2}}}"
    yield f"{a}^{{{b}}} \\bmod {a + 1}"
    yield f"F_{{{b}}}"


def _collections(rng):
    a, n = rng.randint(2, 9999), rng.randint(3, 60)
    yield "\\{" + ", ".join(f"x_{{{a + k}}}" for k in range(n)) + "\\}"
    yield "\\{" + ", ".join(f"\\sqrt{{{a + k}}}" for k in range(n)) + "\\}"
    yield f"({a}, {a + 1}) \\cup " * (n // 2) + "(1, 2)"
    yield "[" + ",".join(f"x+{a + k}" for k in range(n)) + "]"
    rows = " \\\\ ".join(" & ".join(str(a + i * k) for i in range(7)) for k in range(1, 7))
    yield f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}^{{{n}}}"
    yield f"\\begin{{pmatrix}} {rows} \\end{{pmatrix}}^{{-1}}"
    yield " \\pm ".join(str(a + k) for k in range(n // 3 + 2))
    yield f"x^{{{n}}}+{a}x+1=0"
    yield f"x^5-{a}x+{n} < \\sin x"


def _markup(rng):
    n, a = rng.randint(20, 2000), rng.randint(2, 99)
    for opens, closes in (
        ("\\boxed{", "}"),
        ("(", ")"),
        ("{", "}"),
        ("\\left(", "\\right)"),
        ("\\frac{1}{", "}"),
    ):
        yield opens * n + str(a) + closes * n
    for repeated in (
        "}",
        "\\",
        "a_",
        "1+",
        "--",
        "\\text{",
        "|",
        "\u0660",
        "\U0001d7d9",
        "\x00",
        "\ud800",
        "1",
        "x",
    ):
        yield repeated * n + str(a)


def _replies(rng):
    n = rng.randint(10**4, 10**6)
    for repeated in (
        "\\boxed{",
        "The answer is 17. ",
        "<think>",
        "#### ",
        "1",
        " ",
        "```python\n",
        "<tool_call>",
        "$$",
    ):
        yield repeated * n


_FAMILIES = (_polynomials, _roots, _powers, _functions, _counts, _collections, _markup)
_GOLDS = ("2\\sqrt{3}", "x^2+1", "18", "\\frac{7}{3}", "\\{1, 2\\}", "(0, 1]", "\\sqrt{2}+\\sqrt{5}", "x=3")


def hostile(count, seed=0):
    """Return `count` replies of every family with a ground truth that each of them misses; no two ask the same question."""
    rng = random.Random(seed)
    drawn = {}
    while len(drawn) < count:
        boxed = [f"\\boxed{{{answer}}}" for family in _FAMILIES for answer in family(rng)]
        for reply in boxed + (
            [f"\\boxed{{{bomb}}}" for bomb in BOMBS] + list(_replies(rng)) if not drawn else []
        ):
            drawn.setdefault(reply, rng.choice(_GOLDS))
    return rng.sample(list(drawn.items()), count) if count else []
