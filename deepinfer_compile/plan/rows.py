"""The table of row arrays: everything the host writes before a step, and what it means.

Padding rows hold zeros in all of them: slot 0 and page 0, which no request has, and for the sampler
a greedy row without a mask or a list.
"""

from __future__ import annotations

ROW_ARRAYS = {
    "token_id": "scheduler: the token of each row",
    "position": "scheduler: its position in the request, from 0",
    "slot": "scheduler: the request's state slot, 0 for padding",
    "row_start": "scheduler: first row, in this step, of the same request",
    "image": "scheduler: 1 on rows of an image span, else 0",
    "page_table": "scheduler: pages of each slot's request, in order",
    "sample_row": "scheduler: which row of the forward phase to sample from",
    "masked": "grammar: 1 on rows that have a mask, 0 for all tokens allowed",
    "allowed": "grammar: a bit per token, 32 in a word, the lowest first; 1 is allowed",
    "temperature": "sampling parameters: 0 is the argmax, whatever the filters",
    "top_p": "sampling parameters: the mass that is kept, 1 for all",
    "top_k": "sampling parameters: how many tokens are kept, 0 or less for all",
    "min_p": "sampling parameters: kept share of the best token's probability, 0 for all",
    "top_count": "sampling parameters: how many of the most likely tokens to list",
    "seed": "sampling parameters: 64 random bits of the request",
    "sample_position": "scheduler: absolute position of the token being sampled",
}
