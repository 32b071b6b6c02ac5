"""Structured output: what a request asks for, grammars, and the tokens they allow next.

    so_args --asked--> Structure --library, in a pool--> Matcher --constraint--> mask words

Only `library.py` knows the package that matches tokens. Nothing here needs torch.
"""
