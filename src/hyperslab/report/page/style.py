"""The page's style sheet: one palette for light, one for dark, ink on white in print.

The first three data colours are from the palette of Okabe and Ito (2008), which people with any
common colour blindness can tell apart; figures with more of them differ in line style, too.
"""

from __future__ import annotations

CSS = """
:root {
  --paper: #fdfdfc; --panel: #f4f4f1; --ink: #1c1f24; --muted: #5b626d; --rule: #d9dbd6;
  --first: #0072b2; --second: #b84a00; --third: #00785a; --wash: #0072b224;
  --fourth: #a8437f; --fifth: #8a6d00; --sixth: #6b4226;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --panel: #1d2127; --ink: #e8e9ea; --muted: #a0a8b3; --rule: #363c45;
    --first: #56b4e9; --second: #f0a030; --third: #2fc79a; --wash: #56b4e92e;
  --fourth: #dd8fc0; --fifth: #e0d050; --sixth: #c9a27e;
  }
}
@media print {
  :root {
    --paper: #fff; --panel: #fff; --ink: #000; --muted: #444; --rule: #ccc;
    --first: #0072b2; --second: #b84a00; --third: #00785a; --wash: #0072b224;
  --fourth: #a8437f; --fifth: #8a6d00; --sixth: #6b4226;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body {
  margin: 0 auto; padding: 2.5rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 70rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
}
h1, h2, h3, p, dl, dd, figure { margin: 0; }
h1 { font-size: clamp(1.6rem, 5vw, 2.3rem); line-height: 1.15; letter-spacing: -0.015em;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin-bottom: 0.75rem; }
h3 { font-size: 1rem; font-weight: 600; }
h3.part { font-size: 1.1rem; margin-top: 2rem; }
.eyebrow { color: var(--muted); font-size: 0.85rem; margin-bottom: 0.35rem; }
.lede { color: var(--muted); margin-top: 0.5rem; font-size: 1.05rem; overflow-wrap: anywhere; }
section { margin-top: 2.75rem; padding-top: 1.5rem; border-top: 1px solid var(--rule); }
section > p, section > .prose { max-width: 44rem; }
section > * + * { margin-top: 1rem; }
a { color: var(--first); }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.25rem; margin-top: 1.5rem; }
:focus-visible { outline: 2px solid var(--first); outline-offset: 2px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 1px; margin-top: 1.75rem; background: var(--panel); border: 1px solid var(--rule);
  border-radius: 8px; overflow: hidden; }
.tiles div { padding: 0.9rem 1.1rem; box-shadow: 0 0 0 1px var(--rule); }
.tiles dt { font-size: 0.85rem; color: var(--muted); }
.tiles dd { font-size: 1.35rem; font-weight: 600; line-height: 1.35; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: 0.82rem; font-weight: 400; color: var(--muted);
  white-space: normal; line-height: 1.35; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr));
  gap: 0.9rem 2rem; }
.facts dt { font-size: 0.85rem; color: var(--muted); }
.facts dd { overflow-wrap: anywhere; }
.figures { display: grid; gap: 2rem 2.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.figures.medium { gap: 1.75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
.figures.small { gap: 1.75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 14rem), 1fr)); }
.figures.tiny { gap: 1.25rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 10.5rem), 1fr)); }
.tiny h3 { min-height: 2.6em; line-height: 1.3; font-size: 0.92rem; }
figure { break-inside: avoid; max-width: 40rem; }
.wide { grid-template-columns: 1fr; }
.wide figure { max-width: none; }
.medium figure { max-width: 28rem; }
.small figure, .tiny figure { max-width: 20rem; }
figcaption { color: var(--muted); font-size: 0.88rem; line-height: 1.45; }
svg { display: block; width: 100%; height: auto; margin: 0.35rem 0 0.25rem;
  stroke-linejoin: round; stroke-linecap: butt; font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 1.25rem; margin: 1rem 0 0; padding: 0;
  list-style: none; }
.swatch { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.45em;
  border-radius: 3px; vertical-align: -0.08em; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 0.95rem; }
caption { text-align: left; color: var(--muted); font-size: 0.88rem; padding-bottom: 0.5rem; }
th, td { text-align: right; padding: 0.45rem 0.75rem; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
thead th { font-weight: 600; border-bottom: 2px solid var(--rule); }
th:first-child { text-align: left; padding-left: 0; }
tbody th { font-weight: 600; }
tbody th small { font-weight: 400; color: var(--muted); }
.bar { display: inline-block; min-width: 7rem; padding: 0.1rem 0.4rem; border-radius: 3px;
  background: linear-gradient(to right, var(--wash) var(--share), transparent var(--share));
  box-shadow: inset 0 0 0 1px var(--rule); print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.notice { border-left: 3px solid var(--second); background: var(--panel); padding: 0.9rem 1.1rem;
  border-radius: 0 6px 6px 0; }
pre { margin: 0.5rem 0 0; overflow-x: auto; font-size: 0.88rem; }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
details pre { background: var(--panel); padding: 0.9rem 1.1rem; border-radius: 6px; }
summary { cursor: pointer; color: var(--first); }
footer { margin-top: 3rem; color: var(--muted); font-size: 0.85rem; }
@media print {
  @page { margin: 15mm; }
  body { padding: 0; max-width: none; font-size: 10.5pt; }
  nav, details { display: none; }
  section { break-inside: auto; margin-top: 1.5rem; }
  h2, h3, h3 + p { break-after: avoid; }
  .tiles { grid-template-columns: repeat(3, 1fr); }
  .tiles, .facts div, tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures.medium { grid-template-columns: repeat(3, 1fr); }
  .figures.small { grid-template-columns: repeat(4, 1fr); gap: 1rem; }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
}
"""
