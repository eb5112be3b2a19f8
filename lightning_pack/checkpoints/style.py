"""The style sheet of the report: light and dark, wide and narrow, screen and paper. Nothing of it is loaded from anywhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f6f3; --card: #ffffff; --ink: #1d2329; --soft: #5c6670; --rule: #e3e3dd; --grid: #ecece7;
  --real: #2f6db3; --alignment: #e08c2b; --tail: #a9b4c0; --lost: #b5405a; --speed: #2c8a72; --work: #7a58b0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1c2127; --ink: #e7eaee; --soft: #98a3af; --rule: #2e353d; --grid: #272d34;
    --real: #6aa5e8; --alignment: #f0a850; --tail: #5d6976; --lost: #e27890; --speed: #5bc0a4; --work: #ad92e0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  -webkit-print-color-adjust: exact; print-color-adjust: exact;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1, h2, h3, p, figure, table, dl, dd { margin: 0; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -.005em; margin: 44px 0 14px; }
h3 { font-size: 15px; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .88em; }
.eyebrow { color: var(--real); font-weight: 600; font-size: 13px; letter-spacing: .04em; margin-bottom: 6px; }
.sub { color: var(--soft); margin-top: 8px; overflow-wrap: anywhere; }
.remark { margin-top: 12px; padding: 10px 14px; border-left: 3px solid var(--real); background: var(--card);
  border-radius: 0 8px 8px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; margin-top: 28px; }
.tile, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; }
.tile { padding: 14px 16px; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { font-size: 25px; font-weight: 620; line-height: 1.3; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.tile dd + dd { color: var(--soft); font-size: 12.5px; font-weight: 400; line-height: 1.4; letter-spacing: 0; }
.bar { display: flex; height: 26px; border-radius: 7px; overflow: hidden; background: var(--grid); }
.bar i { display: block; min-width: 1px; }
.card { padding: 18px 20px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.charts .chart:first-child, .charts .chart:last-child:nth-child(even) { grid-column: 1 / -1; }
.chart { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px 12px;
  break-inside: avoid; }
figcaption p { color: var(--soft); font-size: 13px; line-height: 1.4; }
.plot { position: relative; margin: 14px 6px 0 58px; padding-bottom: 22px; }
.plot svg { display: block; width: 100%; height: 190px; overflow: visible; }
.y span, .x span { position: absolute; color: var(--soft); font-size: 12px; line-height: 1; font-variant-numeric:
  tabular-nums; white-space: nowrap; }
.y { position: absolute; inset: 0 auto 22px 0; }
.y span { right: 8px; transform: translateY(-50%); }
.x { position: absolute; left: 0; right: 0; bottom: 0; height: 12px; }
.x span { transform: translateX(-50%); }
.grid { stroke: var(--grid); vector-effect: non-scaling-stroke; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.line.real { stroke: var(--real); } .line.speed { stroke: var(--speed); } .line.work { stroke: var(--work); }
  .line.lost { stroke: var(--lost); }
.area.alignment { fill: var(--alignment); } .area.tail { fill: var(--tail); }
.hint { fill: transparent; } .hint:hover { fill: var(--ink); fill-opacity: .07; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 12.5px; margin-top: 8px; }
.chart .legend { margin-left: 58px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
.legend .unit { margin-left: auto; }
i.real { background: var(--real); } i.alignment { background: var(--alignment); } i.tail { background: var(--tail); }
  i.lost { background: var(--lost); }
table { width: 100%; border-collapse: collapse; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12.5px; padding: 0 14px 8px 0; white-space: nowrap; }
td { border-top: 1px solid var(--rule); padding: 9px 14px 9px 0; vertical-align: top; overflow-wrap: anywhere; }
td:last-child, th:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
td.soft, td .soft { color: var(--soft); }
td code { display: inline-block; background: var(--grid); border-radius: 5px; padding: 1px 6px; margin: 0 4px 4px 0;
  max-width: 100%; }
td:first-child { font-weight: 550; white-space: nowrap; overflow-wrap: normal; }
td[data-name] { white-space: nowrap; }
.more { margin-top: 12px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; line-height: 1.55; }
footer { color: var(--soft); font-size: 13px; margin-top: 40px; }
@media (max-width: 700px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 24px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tile { padding: 11px 12px; } .tile dd { font-size: 20px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .plot { margin-left: 50px; } .plot svg { height: 150px; }
  .chart .legend { margin-left: 0; } .chart { padding: 14px 14px 10px; } .card { padding: 14px; }
  .stack thead { display: none; }
  .stack tr { display: block; border-top: 1px solid var(--rule); padding: 8px 0; }
  .stack tr:first-child { border-top: 0; }
  .stack td { display: block; white-space: normal; border: 0; padding: 1px 0; text-align: left; }
  .stack td[data-name]::before { content: attr(data-name) " "; color: var(--soft); font-size: 12.5px; }
}
@media print {
  @page { margin: 14mm 12mm; }
  :root {
    color-scheme: light;
    --paper: #fff; --card: #fff; --ink: #111; --soft: #555; --rule: #ccc; --grid: #e6e6e6;
    --real: #2f6db3; --alignment: #e08c2b; --tail: #a9b4c0; --lost: #b5405a; --speed: #2c8a72; --work: #7a58b0;
  }
  body { font-size: 12px; } main { padding: 0; max-width: none; }
  .tiles { grid-template-columns: repeat(5, 1fr); gap: 6px; } .tile { padding: 8px 10px; } .tile dd { font-size: 18px;
    } .tile dd + dd { font-size: 10.5px; }
  h2 { margin: 22px 0 8px; break-after: avoid; } .plot svg { height: 96px; } .chart { padding: 10px 14px 8px; }
  .tile, .chart, tr, .bar { break-inside: avoid; }
  .whole { break-inside: avoid; }
}
""".strip()
