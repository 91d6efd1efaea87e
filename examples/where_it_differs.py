"""Where a tier differs from the base: the articles and the tokens with the largest KLD, from the rows of an audit.

    python examples/where_it_differs.py RUN/audit/Q4_K_M/rows.parquet

A mean hides whether a tier is a little off everywhere or far off in a few places. The columns are those of `spec/records.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd


def by_article(rows: pd.DataFrame) -> pd.DataFrame:
    """For each article: scored tokens, mean KLD in nats, share of tokens whose most likely successor is the same."""
    same = rows.assign(same_top_p=rows["top1_q"] == rows["top1_base"])
    table = same.groupby("article").agg(n_scored=("kld", "size"), kld=("kld", "mean"), same_top_p=("same_top_p", "mean"))
    return table.sort_values("kld", ascending=False)


def worst_tokens(rows: pd.DataFrame, n: int) -> pd.DataFrame:
    """The n scored positions with the largest KLD."""
    return rows.nlargest(n, "kld")[["chunk", "pos", "token", "kld", "nll_base", "nll_q", "margin_base"]]


def main(path: Path) -> None:
    """Print both tables, and how much of all KLD the worst hundredth of the tokens carries."""
    rows = pd.read_parquet(path)
    n_worst = max(1, len(rows) // 100)
    share = rows["kld"].nlargest(n_worst).sum() / rows["kld"].sum() if rows["kld"].any() else 0.0
    print(by_article(rows).head(10).to_string())
    print()
    print(worst_tokens(rows, 10).to_string(index=False))
    print()
    print(f"{n_worst} of {len(rows)} tokens carry {share:.0%} of all KLD")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
