// SPDX-License-Identifier: MIT
// On a narrow screen, a tall page shows long tables folded: what follows is not many screens away.
const narrow = matchMedia("(max-width: 44.98em)").matches;
if (narrow && document.documentElement.scrollHeight > 9000)
  for (const table of document.querySelectorAll("details.rows")) table.open = false;
