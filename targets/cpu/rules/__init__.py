"""One rule per operator, by family; `targets/cpu/__init__.py` orders them."""
