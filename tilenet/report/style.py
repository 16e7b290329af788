"""How the page looks: dark on light, at 1200 px and in print."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light; --ink: #1b2530; --soft: #55616e; --line: #d8dee4; --pale: #f5f7f9 }
* { box-sizing: border-box }
body { margin: 0; background: #eef1f4; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px }
header, section { background: #fff; border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 24px 20px; margin-bottom: 18px }
h1 { font-size: 26px; margin: 0 0 12px; overflow-wrap: anywhere }
h1 small { color: var(--soft); font-size: 15px; font-weight: 400; margin-left: 10px }
h2 { font-size: 20px; margin: 0 0 10px }
h3 { font-size: 15px; margin: 16px 0 8px; color: var(--soft); font-weight: 600 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0 }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
p.note { color: var(--soft); margin: 8px 0 0; max-width: 90ch; overflow-wrap: anywhere }
p.word { background: #fff4e0; border-left: 4px solid #e69f00; margin: 0 0 14px; padding: 8px 14px;
  overflow-wrap: anywhere }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 20px; align-items: start }
figure { margin: 0; min-width: 0 }
figcaption { color: var(--soft); font-size: 13px; margin-top: 4px }
.key { display: inline-block; margin-right: 16px }
.key i { display: inline-block; width: 12px; height: 12px; border: 1px solid #0003;
  border-radius: 2px; vertical-align: -1px }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "DejaVu Sans", sans-serif }
svg text { fill: var(--soft) }
svg text.label { fill: var(--ink); font-size: 13px }
svg .grid { stroke: #e7ebef }
svg .axis, svg .tick { stroke: #8a96a3 }
svg circle.mark { fill: none; stroke: var(--ink); stroke-width: 2 }
svg text.mark { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: #fff;
  stroke-width: 4px }
svg.tiles { max-height: 720px }
table { border-collapse: collapse; margin: 10px 0 4px; font-size: 14px;
  font-variant-numeric: tabular-nums; max-width: 100% }
caption { text-align: left; font-weight: 600; padding-bottom: 4px }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: middle }
th { font-weight: 600; background: var(--pale) }
th[scope=col] { overflow-wrap: break-word; max-width: 160px }
th[scope=row], thead th:first-child { text-align: left; overflow-wrap: break-word;
  max-width: 360px }
td { white-space: nowrap }
td.words { text-align: left; white-space: normal }
.wide { overflow-x: auto }
.bar { display: flex; width: 260px; height: 14px }
.bar i { display: block; height: 14px }
.four { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px }
.four img { height: auto; display: block; border: 1px solid var(--line);
  image-rendering: pixelated; background: #fff }
pre { background: var(--pale); border: 1px solid var(--line); border-radius: 6px; margin: 0;
  padding: 12px 16px; font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  columns: 3; column-gap: 28px; white-space: pre-wrap; overflow-wrap: anywhere }
footer { color: var(--soft); font-size: 13px }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr } .four {
  grid-template-columns: 1fr 1fr } pre { columns: 1 } }
@media print { body { background: #fff; font-size: 11px }
  main { max-width: none; padding: 0 } header, section { border: 0; padding: 6px 0 }
  figure, table, .place { break-inside: avoid } h2, h3 { break-after: avoid }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact } .wide { overflow: visible } }
"""
