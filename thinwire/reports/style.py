"""Style sheet of the page: light and dark, phone and desktop, colors that are distinct for any color vision.

Texts and the eight series colors have a contrast of at least 4.5 to 1 against their background (`contrast`), and charts
never rely on color alone.
"""

from __future__ import annotations

LIGHT = ("#0063a8", "#c04a00", "#00785a", "#a03a86", "#7b5b00", "#3a3f9e", "#b3123f", "#4d5b66")
DARK = ("#5bb8f5", "#ff9650", "#38c99a", "#ee9bd2", "#e8c14a", "#a9a8ff", "#ff8499", "#b4c0ca")
BACKGROUNDS = ("#ffffff", "#171b20")


LIGHT_COLORS = {
    "page": "#f4f5f7",
    "card": BACKGROUNDS[0],
    "ink": "#1b1f24",
    "soft": "#566069",
    "edge": "#d9dde2",
    "grid": "#e5e8ec",
    "note": "#fff4d6",
    **{f"c{i}": color for i, color in enumerate(LIGHT)},
}
DARK_COLORS = {
    "page": "#0e1114",
    "card": BACKGROUNDS[1],
    "ink": "#e8ebee",
    "soft": "#a3adb7",
    "edge": "#2c333b",
    "grid": "#2a3037",
    "note": "#3a3116",
    **{f"c{i}": color for i, color in enumerate(DARK)},
}


def contrast(one: str, other: str) -> float:
    """The contrast of two colors by WCAG 2, from 1 to 21.

    >>> round(contrast("#777777", "#ffffff"), 2)
    4.48
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


_ROOT = (
    f":root{{color-scheme:light dark;{_variables(LIGHT_COLORS)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_variables(DARK_COLORS)}}}}}"
    + "".join(f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}" for i in range(len(LIGHT)))
)

_CHART = """svg .tick,svg .axis,svg .mark-name{fill:var(--soft)}
svg .value,svg .name{font-size:13px}
svg .value{font-variant-numeric:tabular-nums;font-weight:600}
svg .halo{paint-order:stroke;stroke:var(--card);stroke-width:5px}
.grid{stroke:var(--grid);fill:none}
.mark{stroke:var(--soft);stroke-dasharray:1 3;fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.band{fill-opacity:.13}
.dot{stroke:var(--card);stroke-width:1}
.outline{fill:none;stroke-width:1.5;stroke-dasharray:3 2}
"""

# of a chart as a file
STANDALONE = (
    _ROOT
    + _CHART
    + """text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans","DejaVu Sans",sans-serif;
fill:var(--ink)}
.paper{fill:var(--card)}
"""
)

STYLE = (
    _ROOT
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Liberation Sans","DejaVu Sans",sans-serif;overflow-wrap:anywhere}
header,main,footer{max-width:1142px;margin:0 auto;padding:0 16px}
header{padding-top:32px}
h1{font-size:1.7rem;line-height:1.2;margin:0}
header p,footer p{color:var(--soft);margin:.25rem 0 0}
footer{padding-bottom:32px}
section{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:20px 24px;margin:20px 0}
h2{font-size:1.2rem;margin:0 0 .5rem}
p{margin:.5rem 0;max-width:75ch}
.note{background:var(--note);padding:8px 12px;border-radius:8px}
figure{margin:20px 0}
figcaption{margin-bottom:6px}
figcaption span{color:var(--soft)}
.lead{font-size:1.15rem;font-weight:600}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 8px;padding:0;font-size:.9rem}
.legend li{display:flex;align-items:center;gap:6px}
.swatch{flex:none}
svg{display:block;max-width:100%;height:auto;font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",
"DejaVu Sans",sans-serif;fill:var(--ink)}
"""
    + _CHART
    + """.narrow{display:none}
.table{overflow-x:auto;margin:16px 0;border:1px solid var(--edge);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
caption{text-align:left;font-weight:600;border-bottom:1px solid var(--edge)}
caption span{display:inline-block;position:sticky;left:0;padding:10px;max-width:min(1000px,calc(100vw - 48px))}
th,td{padding:6px 7px;text-align:right;vertical-align:top}
td{white-space:nowrap}
.words td,.words th{white-space:normal;text-align:left}
.words td{overflow-wrap:anywhere;width:100%}
summary{cursor:pointer;font-weight:600;padding:4px 0}
thead th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--edge);vertical-align:bottom}
tbody tr+tr>*{border-top:1px solid var(--grid)}
th:first-child{text-align:left;white-space:nowrap;position:sticky;left:0;background:var(--card)}
.long-names th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:13em}
.words th:first-child{white-space:normal;overflow-wrap:anywhere;min-width:min(17em,38vw)}
h2+figure{margin-top:8px}
pre{overflow-x:auto;background:var(--page);border:1px solid var(--edge);border-radius:8px;padding:12px;font-size:.85rem}
code{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.wide svg{width:100%}
.whisker{fill:none;stroke:var(--ink);stroke-width:1.5}
.table{--shade:#0003;background:linear-gradient(to left,var(--card) 40%,transparent) right/48px 100% no-repeat local,
linear-gradient(to left,var(--shade),transparent) right/18px 100% no-repeat scroll}
@media(prefers-color-scheme:dark){.table{--shade:#000b}}
@media(max-width:820px){
.wide{display:none}.narrow{display:block;max-width:480px}.narrow svg{width:100%}
header,main,footer{padding-left:10px;padding-right:10px}header{padding-top:20px}
section{padding:14px 12px;border-radius:10px;margin:12px 0}h1{font-size:1.35rem}
th,td{padding:6px 8px}
.long-names th:first-child{min-width:42vw}
pre{white-space:normal}pre code{display:block;padding-left:2em;text-indent:-2em}
}
@media print{body{background:none}section{break-inside:avoid;border:0;padding:0}}
"""
)
