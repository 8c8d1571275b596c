// Typesets the formulas that arithmatex marked. KaTeX 0.19.1 (LICENSE here) is served with the site.
for (const found of document.querySelectorAll(".arithmatex")) {
  const text = found.textContent.trim();
  katex.render(text.slice(2, -2), found, { displayMode: text.startsWith("\\["), throwOnError: false });
}
