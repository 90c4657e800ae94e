"use strict";
// Draws the charts of #data, and works the controls: the x axis of the curves, the colours of tokens, light and dark.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const AXES = { steps: "step", tokens: "trained tokens", hours: "hours since the start" };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  let against = "steps";

  const dressed = (layout) => {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
    const titled = (one) => ({ ...axis, ...one, title: { ...one?.title, font: { size: 11, color: colour("--faint") } } });
    return {
      ...layout,
      xaxis: titled(layout.xaxis),
      yaxis: titled(layout.yaxis),
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink"), size: 11 },
      margin: { l: 45, r: 12, t: 12, b: 35 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", bgcolor: "transparent" },
      hoverlabel: { font: { size: 12 } },
    };
  };

  const draw = () => {
    for (const [id, chart] of Object.entries(charts)) {
      const data = chart.data.map((trace) => ({
        ...trace,
        ...(trace.meta ? { x: trace.meta[against] } : {}),
      }));
      const layout = { xaxis: { title: { text: AXES[against] } }, ...chart.layout };
      Plotly.react(id, data, dressed(layout), { responsive: true, displayModeBar: false });
    }
  };

  const useTheme = (name) => {
    root.classList.remove("light", "dark");
    root.classList.add(name);
    draw();
  };

  document.getElementById("theme").addEventListener("click", () => {
    useTheme(root.classList.contains("dark") ? "light" : "dark");
  });
  document.getElementById("axis")?.addEventListener("change", (event) => {
    against = event.target.value;
    draw();
  });
  for (const choice of document.querySelectorAll(".colouring")) {
    choice.addEventListener("change", (event) => {
      const shown = choice.parentElement.querySelector(".samples");
      shown.classList.toggle("by-version", event.target.value === "version");
      shown.classList.toggle("by-logprob", event.target.value === "logprob");
    });
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => useTheme(dark.matches ? "dark" : "light"));
  useTheme(dark.matches ? "dark" : "light");
})();
