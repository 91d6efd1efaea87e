"""A run in pandas, cell by cell, as in a notebook.

    python examples/notebook_style.py RUN

What each frame holds is in `quantkit/report/notebook.py` and docs/REPORTS.md.
"""

from __future__ import annotations

import sys

import quantkit

# %% The table: numbers as numbers, fractions rather than percent, NaN where there is no interval
run = quantkit.load_run(sys.argv[1])
table = run.tiers.set_index("tier")[["size_bytes", "bpw", "kld_mean", "kld_mean_lo", "kld_mean_hi", "same_top_p", "letters"]]
print(table.to_string())

# %% What a byte buys: KLD lost for each MiB saved, from tier to tier
quantized = run.tiers[run.tiers["is_base"] == 0]
steps = quantized[["size_bytes", "kld_mean"]].diff().iloc[1:]
print((steps["kld_mean"] / (-steps["size_bytes"] / 2**20)).rename("nats a MiB").to_string(index=False))

# %% The tail: the share of all KLD that the worst hundredth of the tokens carries
for tier, kld in run.rows.groupby("tier", sort=False)["kld"]:
    worst = kld.nlargest(max(1, len(kld) // 100)).sum() / kld.sum()
    print(f"{tier}: {worst:.1%}")

# %% Which pairs are told apart, and how large a difference this text could have shown
if len(run.pairs):
    by_kld = run.pairs[run.pairs["statistic"] == "kld"]
    print(by_kld[["a", "b", "difference", "p_holm", "detectable", "verdict"]].to_string(index=False))

# %% Where the bytes of each tier are
print(run.plan.pivot_table(index="kind", columns="tier", values="size_bytes", aggfunc="sum", sort=False).to_string())
