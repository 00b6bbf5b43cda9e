"""Charts as SVG that stands in a page: no script, and colours by the names of CSS properties, so that the page decides them.

All are drawn 440 wide, so that one drawing can be read in a column of a wide page, on a phone, and on paper.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import vl_convert

from pipelines.histograms import Histogram
from pipelines.timeline import Timeline

WIDTH = 440
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_BAR_HEIGHT = 24
_THIN_BAR_HEIGHT = 17
_FEW_BARS = 12
_LABEL_SHARE = 0.16  # of the longest bar: as wide as a phase's name
_DASHES = {"p50": [1, 0], "p95": [6, 3], "p99": [2, 3]}  # told apart without colour
_QUANTILE_ROOM = 0.16  # of the height, above the bars, for the quantiles' labels
_LABEL_WIDTH = 0.075  # of the width, of such a label
_NAMED_BAR = 40
_NAME_ROOM = 180
_CHARACTER_WIDTH = 7

_Rows = list[dict[str, Any]]


def over_time(timeline: Timeline, series: Sequence[float]) -> str:
    """A series of the timeline as an area, with a line where each attempt after the first begins."""
    unit, seconds = _unit(timeline.bin_s * len(series))
    points = [{"at": i * timeline.bin_s / seconds, "value": value} for i, value in enumerate(series)]
    points.append({"at": len(series) * timeline.bin_s / seconds, "value": series[-1]})
    x = alt.X("at:Q", title=f"{unit} with workers", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6, grid=False))
    area = (
        alt.Chart(alt.NamedData("points"))
        .mark_area(
            interpolate="step-after",
            color="var(--accent)",
            fillOpacity=0.25,
            line={"color": "var(--accent)", "strokeWidth": 1.5},
        )
        .encode(x=x, y=alt.Y("value:Q", title=None, axis=_number_axis(4)))
    )
    starts = [{"at": at / seconds, "label": f"attempt {number}"} for number, at in timeline.attempts[1:]]
    if not starts:
        return _svg(area, {"points": points}, height=130)
    base = alt.Chart(alt.NamedData("starts")).encode(x=alt.X("at:Q"))
    rule = base.mark_rule(color="var(--ink)", strokeDash=[4, 3])
    label = base.mark_text(align="center", baseline="bottom", color="var(--ink)", fontSize=12).encode(
        text=alt.Text("label:N"), y=alt.value(-3)
    )
    return _svg(alt.layer(area, rule, label), {"points": points, "starts": starts}, height=130)


def distribution(histogram: Histogram, unit: str) -> str:
    """Bars of values in tokens or seconds, and the quantiles as lines of different dashes with their names."""
    scale = 1000.0 if unit == "seconds" and histogram.edges[-1] < 1 else 1.0
    edges = [max(0.0, edge) * scale if unit == "seconds" else edge for edge in histogram.edges]
    bars = [
        {"from": edges[i], "to": edges[i + 1], "rows": count, "none": 0}
        for i, count in enumerate(histogram.counts)
        if count > 0
    ]
    margin = edges[1] - edges[0]
    domain = [edges[0] - margin, edges[-1] + margin]
    quantiles = {name: value * scale for name, value in histogram.quantiles.model_dump().items() if value is not None}
    lines = _apart({name: value for name, value in quantiles.items() if value <= edges[-1]}, domain)
    x = alt.X("from:Q", title="milliseconds" if scale > 1 else unit, scale=alt.Scale(domain=domain, nice=False))
    x = x.axis(tickCount=6, grid=False)
    top = max(histogram.counts) / (1 - _QUANTILE_ROOM)
    y = alt.Y("rows:Q", title=None, scale=alt.Scale(domain=[0, top], nice=False), axis=_number_axis(3))
    drawn = (
        alt.Chart(alt.NamedData("bars"))
        .mark_rect(color="var(--accent)", fillOpacity=0.55, stroke="var(--accent)", strokeWidth=0.6)
        .encode(x=x, x2=alt.X2("to:Q"), y=y, y2=alt.Y2("none:Q"))
    )
    base = alt.Chart(alt.NamedData("quantiles"))
    dashes = alt.StrokeDash("name:N", scale=alt.Scale(domain=list(_DASHES), range=list(_DASHES.values())), legend=None)
    rule = base.mark_rule(color="var(--ink)", strokeWidth=1.2).encode(x=alt.X("at:Q"), strokeDash=dashes)
    label = base.mark_text(baseline="bottom", color="var(--ink)", fontSize=12).encode(
        x=alt.X("label_at:Q"), text=alt.Text("name:N"), y=alt.value(-3)
    )
    return _svg(alt.layer(drawn, rule, label), {"bars": bars, "quantiles": lines}, height=110)


def _apart(quantiles: Mapping[str, float], domain: Sequence[float]) -> _Rows:
    """Where the labels go: apart from one another, and on the chart."""
    width = domain[1] - domain[0]
    lines: _Rows = []
    least = domain[0] + _LABEL_WIDTH / 2 * width
    for name, at in quantiles.items():
        lines.append({"name": name, "at": at, "label_at": max(at, least)})
        least = lines[-1]["label_at"] + _LABEL_WIDTH * width
    most = domain[1] - _LABEL_WIDTH / 2 * width
    for line in reversed(lines):
        line["label_at"] = min(line["label_at"], most)
        most = line["label_at"] - _LABEL_WIDTH * width
    return lines


def stacked(bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, tuple[str, str]]) -> str:
    """Hours of each bar's parts, one after the other; `colours` names each part's fill and ink, in their order."""
    unit, seconds = _unit(max(sum(parts.values()) for parts in bars.values()))
    longest = max(sum(parts.values()) for parts in bars.values()) / seconds
    rows: _Rows = []
    for bar, parts in bars.items():
        start = 0.0
        for part in colours:
            end = start + parts[part] / seconds
            if end > start:
                label = part if end - start >= _LABEL_SHARE * longest else ""
                rows.append({"bar": bar, "part": part, "from": start, "to": end, "middle": (start + end) / 2, "label": label})
            start = end
    scale = alt.Scale(domain=list(colours), range=[fill for fill, _ in colours.values()])
    inks = alt.Scale(domain=list(colours), range=[ink for _, ink in colours.values()])
    y = alt.Y("bar:N", sort=None, title=None, scale=alt.Scale(domain=list(bars)), axis=_name_axis(bars))
    x = alt.X("from:Q", title=unit, axis=alt.Axis(tickCount=5, grid=True), scale=alt.Scale(domain=[0, longest], nice=False))
    base = alt.Chart(alt.NamedData("rows")).encode(y=y)
    drawn = base.mark_bar(stroke="var(--page)", strokeWidth=1).encode(
        x=x, x2=alt.X2("to:Q"), color=alt.Color("part:N", scale=scale, legend=None)
    )
    text = base.mark_text(fontSize=10.5, baseline="middle").encode(
        x=alt.X("middle:Q"), text=alt.Text("label:N"), color=alt.Color("part:N", scale=inks, legend=None)
    )
    height = (_BAR_HEIGHT if len(bars) <= _FEW_BARS else _THIN_BAR_HEIGHT) * len(bars)
    return _svg(alt.layer(drawn, text).resolve_scale(color="independent"), {"rows": rows}, height=height)


def named_bars(values: Mapping[str, float], labels: Mapping[str, str], colours: Mapping[str, str]) -> str:
    """A bar for each name, which stands above it with what there is to say: long names have room on any page."""
    rows = [{"name": name, "value": value, "label": f"{name}: {labels[name]}"} for name, value in values.items()]
    y = alt.Y("name:N", sort=None, title=None, scale=alt.Scale(domain=list(values)), axis=None)
    x = alt.X("value:Q", title=None, axis=None, scale=alt.Scale(domain=[0, max(values.values()) or 1.0], nice=False))
    scale = alt.Scale(domain=list(values), range=[colours.get(name, "var(--accent)") for name in values])
    base = alt.Chart(alt.NamedData("rows")).encode(y=y)
    drawn = base.mark_bar(height=12, yOffset=8).encode(x=x, color=alt.Color("name:N", scale=scale, legend=None))
    text = base.mark_text(align="left", dy=-8, color="var(--ink)", fontSize=12, limit=WIDTH).encode(
        text=alt.Text("label:N"), x=alt.value(0)
    )
    return _svg(alt.layer(drawn, text), {"rows": rows}, height=_NAMED_BAR * len(values))


def _svg(chart: alt.Chart | alt.LayerChart | alt.FacetChart, data: Mapping[str, _Rows], *, height: int) -> str:
    """Draw a chart. Its data come in last: Altair copies whatever a chart holds at each step."""
    axis = {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--line)", "domainColor": "var(--line)",
        "tickColor": "var(--line)", "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 6,
    }  # fmt: skip
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")  # axes and labels included: all letters are of one size
    whole = chart.properties(width=WIDTH, height=height, background="transparent", padding=2, autosize=fit)
    whole = whole.configure(font=_FONT, axis=axis, view={"stroke": None}, aria=False)
    svg: str = vl_convert.vegalite_to_svg({**whole.to_dict(validate=False), "datasets": data})
    return svg


def _number_axis(num_ticks: int) -> alt.Axis:
    return alt.Axis(tickCount=num_ticks, labelExpr="format(datum.value, '~s')", domain=False, ticks=False)


def _name_axis(names: Iterable[str]) -> alt.Axis:
    room = min(_NAME_ROOM, _CHARACTER_WIDTH * max(len(name) for name in names))  # the page's font may be wider than this one's
    return alt.Axis(domain=False, ticks=False, labelColor="var(--ink)", labelLimit=_NAME_ROOM, minExtent=room)


def _unit(seconds: float) -> tuple[str, float]:
    """What to count a time in, and how many seconds that is."""
    return ("hours", 3600.0) if seconds > 3 * 3600 else ("minutes", 60.0) if seconds > 3 * 60 else ("seconds", 1.0)
