// SPDX-License-Identifier: MIT
// A narrow screen shows long tables folded: what follows them is not many screens away.
if (matchMedia("(max-width: 44.98em)").matches)
  for (const table of document.querySelectorAll("details.rows")) table.open = false;
