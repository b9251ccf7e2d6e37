"""Hetu-Galvatron side by side: its cost rules restated, its recorded answers, our search.

    python -m benchmarks.galvatron CASE.json... [--profiles DIR] [--format text|json]

``cases`` reads a problem and what the peer answered; ``figures`` are a profile's figures as the
rules use them; ``sharedrules``, ``mainrules`` and ``rules24`` are the cost rules of both engines;
``space``, ``mainspace`` and ``space24`` are what each may choose. ``solve`` finds the optimum with
``counts``, ``relaxation``, ``simplex`` and ``listing``; ``plan`` costs either side's plan again.
"""
