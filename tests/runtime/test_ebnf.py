"""EBNF as users of xgrammar and llama.cpp write it; what is wrong is told with its place."""

from __future__ import annotations

import pytest

from deepinfer_compile.runtime.grammar.ebnf import (
    Choice,
    Class,
    Literal,
    Name,
    Repeat,
    Sequence,
    read_ebnf,
)
from deepinfer_compile.runtime.grammar.errors import GrammarError
from deepinfer_compile.runtime.grammar.lark import lark_of


def test_rules_are_read():
    text = r"""
    # A comment; the rule below spans lines, as its alternatives do.
    root ::=
        "a\n\"" item?   # another
      | ( item | [^\x41-\u0043\]-] ) {2, 3} ""
    item::=[a-z_]+"!"* root{2}{1,}
    """
    assert read_ebnf(text) == {
        "root": Choice(
            (
                Sequence((Literal('a\n"'), Repeat(Name("item"), 0, 1))),
                Sequence(
                    (
                        Repeat(
                            Choice(
                                (
                                    Name("item"),
                                    Class((("A", "C"), ("]", "]"), ("-", "-")), negated=True),
                                )
                            ),
                            2,
                            3,
                        ),
                        Literal(""),
                    )
                ),
            )
        ),
        "item": Sequence(
            (
                Repeat(Class((("a", "z"), ("_", "_")), negated=False), 1, None),
                Repeat(Literal("!"), 0, None),
                Repeat(Repeat(Name("root"), 2, 2), 1, None),
            )
        ),
    }


def test_regular_parts_become_one_expression_each():
    rules = read_ebnf('root ::= [a-z]+ "x" root digit{2} | digit\ndigit ::= [0-9]')
    assert lark_of(rules).splitlines() == [
        "start: r0",
        "r0: (T2 r0 T3) | T1",
        r"T1: /[\x{30}-\x{39}]/",
        r"T2: (/[\x{61}-\x{7A}]/{1,}) /\x{78}/",
        "T3: T1{2,2}",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('rot ::= "a"', "no rule `root`: it is where a text begins"),
        ("root ::= a b\na ::= c", "line 1, column 12: no rule `b`; line 2, column 7: no rule `c`"),
        ('root ::= "a" root', "no text ever ends in `root`: every alternative leads back to it"),
        (
            'root ::= "x" | a\na ::= b\nb ::= a',
            "no text ever ends in `a`, `b`: every alternative leads back to it",
        ),
        ('root ::= "a', 'line 1, column 10: no EBNF begins with `"a`'),
        ('root = "a"', 'line 1, column 6: no EBNF begins with `= "a"`'),
        ('root "a"', "line 1, column 1: expected `name ::=`, found `root`"),
        ('root ::= "a"\n  ) | "b"', "line 2, column 3: expected `name ::=`, found `)`"),
        (
            'root ::= ("a" | ["]',
            "line 1, column 20: expected `)` for the `(` of line 1, column 10, found the end",
        ),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule `root` is defined twice"),
        ("root ::= [b-a]", "line 1, column 10: the range from 'b' to 'a' is empty"),
        ("root ::= []", "line 1, column 10: this class has no characters"),
        (r'root ::= "\q"', r"line 1, column 10: `\q` begins no escape that is known"),
        (r'root ::= "\x4"', r"line 1, column 10: `\x` begins no escape that is known"),
        (r'root ::= "\ud83d"', "line 1, column 10: U+D83D is half a character, not one"),
        (r'root ::= "\U00110000"', r"line 1, column 10: `\U` begins no escape that is known"),
        ('root ::= "a"{3,2}', "line 1, column 13: at most 2 is less than at least 3"),
        ('root ::= (= "a") "b"', 'line 1, column 11: no EBNF begins with `= "a") "b"`'),
    ],
)
def test_faults_have_a_place(text, message):
    with pytest.raises(GrammarError) as caught:
        read_ebnf(text)
    assert str(caught.value).startswith(f"so_args: {message}")
