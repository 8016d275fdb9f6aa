"""A plan's report as one HTML file that needs nothing else: the picture is inside, names from files are escaped."""

from __future__ import annotations

import base64

from memfit.core.units import format_bytes, format_ns
from memfit.report.plan import MOST_SHOWN, PlanReport

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2330; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
img { max-width: 100%; border: 1px solid #e3e6ec; border-radius: 6px; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; border-bottom: 1px solid #e3e6ec; text-align: left; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bar { background: #2a6fdb; height: .7rem; border-radius: 3px; min-width: 1px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<table id="facts">{% for name, value in rows %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Memory over the step</h2>
<img alt="memory over time, with the budget line" src="data:image/png;base64,{{ picture }}">
<h2>At the peak</h2>
<table id="kinds"><tr><th>kind</th><th class="number">bytes</th><th></th></tr>
{% for kind, size, share in kinds %}<tr><td>{{ kind }}</td><td class="number">{{ size }}</td>
<td><div class="bar" style="width: {{ share }}%"></div></td></tr>{% endfor %}
</table>
<h2>Largest storages at the peak</h2>
<table id="largest"><tr><th class="number">bytes</th><th>kind</th><th>name</th><th>made at</th></tr>
{% for x in largest %}<tr><td class="number">{{ x.size }}</td><td>{{ x.kind }}</td><td>{{ x.name }}</td><td>{{ x.where }}</td></tr>{% endfor %}
</table>
{% if recomputed %}<h2>Recomputed, dearest first</h2>
<table id="recomputed"><tr><th class="number">time</th><th class="number">runs more</th><th>op</th><th>where</th></tr>
{% for r in recomputed %}<tr><td class="number">{{ r.time }}</td><td class="number">{{ r.runs }}</td><td>{{ r.name }}</td><td>{{ r.where }}</td></tr>
{% endfor %}</table>{% endif %}
</body>
</html>
"""


def plan_html(report: PlanReport, *, title: str = "memfit plan") -> str:
    """The page's text."""
    from jinja2 import Environment

    most = max(report.at_peak.by_kind.values(), default=0) or 1
    kinds = [(k, format_bytes(v), round(100 * v / most, 1)) for k, v in report.at_peak.by_kind.items() if v]
    largest = [{"size": format_bytes(x.size_bytes), "kind": x.kind, "name": x.name, "where": x.where} for x in report.at_peak.largest]
    recomputed = [
        {"time": format_ns(r.extra_time_ns), "runs": r.extra_runs, "name": r.name, "where": r.where} for r in report.recomputed[:MOST_SHOWN]
    ]
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=title,
            rows=report.rows(),
            picture=base64.b64encode(report.png()).decode(),
            kinds=kinds,
            largest=largest,
            recomputed=recomputed,
        )
    )
