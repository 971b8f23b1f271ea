"""Rewrite the notations of an answer into one: LaTeX commands, Unicode signs, digits with separators."""

from __future__ import annotations

import re

MAX_CHARS = 500
_PLAIN = {
    **dict.fromkeys(("\\left", "\\right", "\\bigl", "\\bigr", "\\Bigl", "\\Bigr", "\\big", "\\displaystyle"), ""),
    **dict.fromkeys(("\\!", "\u200b", "\u200c", "\u2060", "\ufeff", "\\limits"), ""),
    **dict.fromkeys(("\\qquad", "\\quad", "\\;", "\\:", "\\,", "\\ ", "~"), " "),
    **dict.fromkeys("\xa0\u2002\u2003\u2007\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\u2015\ufe63\u02d7", "-"),
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("^{\\circ}", "^\\circ", "^{o}", "\\degree"), "°"),
    "\u2044": "/", "\u2215": "/", "\u00d7": "\\times ", "\u22c5": "\\cdot ", "\u00b7": "\\cdot ", "\u2217": "*",
    "\u00f7": "/", "\\div": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ",
    "\u2260": "\\ne ", "\u00b1": "\\pm ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ",
    "\\varnothing": "\\emptyset", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\leq": "\\le", "\\geq": "\\ge",
    "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "<=": "\\le ", ">=": "\\ge ", " != ": " \\ne ", "{,}": ",", "{:}": ":",
    "{.}": ".",
    "\\%": "%", "\\$": "$", "\\&": "&", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\colon": ":",
}  # fmt: skip
_COMMANDS = re.compile(r"\\\\|" + "|".join(
    re.escape(old) + (r"(?![A-Za-z])" if old[-1].isalpha() and old[0] == "\\" else "")
    for old in sorted(_PLAIN, key=len, reverse=True)
))  # fmt: skip
_RAISED = dict(
    zip(
        "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207f",
        "0123456789-n",
        strict=True,
    )
)
_LOWERED = dict(
    zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089\u2099", "0123456789n", strict=True)
)
_PARTS = {
    "\u00bd": "1/2", "\u2153": "1/3", "\u2154": "2/3", "\u00bc": "1/4", "\u00be": "3/4", "\u2155": "1/5", "\u2156": "2/5",
    "\u2157": "3/5", "\u2158": "4/5", "\u2159": "1/6", "\u215a": "5/6", "\u215b": "1/8", "\u215c": "3/8", "\u215d": "5/8",
    "\u215e": "7/8",
}  # fmt: skip
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_ROOT = re.compile("\u221a ?(?:\\(([^()]*)\\)|(\\w+))")
_ESCAPED = re.compile(r"\\\\(?=[A-Za-z])")  # a backslash that was escaped twice
_SPREAD = re.compile(r",\s*\\!\s*(?=\d{3})")
_ATTACHED = re.compile("(?<=\\d)(?=[a-z]{1,2}[\u00b2\u00b3])")  # 5cm\u00b2
_GROUPS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d,])(?!\.\d* \d)")
_SCRIPTS = tuple(
    (re.compile(f"[{''.join(signs)}]+"), mark, signs) for signs, mark in ((_RAISED, "^"), (_LOWERED, "_"))
)


def rewritten(text: str) -> str:
    r"""Return an answer in one notation; texts of more than 500 characters come back unread.

    >>> rewritten("\u22125\u00bd"), rewritten("x\u00b2 \u2264 12 000"), rewritten("\\dfrac{1}{2}\\,\\%")
    ('-5\\frac{1}{2}', 'x^{2} \\le  12000', '\\frac{1}{2} %')
    """
    if len(text) > MAX_CHARS:
        return text
    if not text.isascii():
        text = _without_unicode(text)
    if "&" not in text and "\\begin" not in text:
        text = _ESCAPED.sub("\\\\", text)
    text = _COMMANDS.sub(lambda found: _PLAIN.get(found[0], found[0]), _SPREAD.sub(",", text))
    return _GROUPS.sub(lambda found: found[1] + found[2].replace(" ", ""), text).strip()


def _without_unicode(text: str) -> str:
    text = _ATTACHED.sub(" ", text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text.translate(_WIDE))
    for pattern, mark, signs in _SCRIPTS:
        for run in set(pattern.findall(text)):
            text = text.replace(run, f"{mark}{{{''.join(map(signs.__getitem__, run))}}}")
    for sign, part in _PARTS.items():
        text = text.replace(sign, "\\frac{{{}}}{{{}}}".format(*part.split("/")))
    return text
