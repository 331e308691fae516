// SPDX-License-Identifier: MIT
// On a tall page long tables are collapsed, so that the text after them is not many screens away.
const narrow = matchMedia("(max-width: 44.98em)").matches;
if (document.documentElement.scrollHeight > (narrow ? 9000 : 9500))
  for (const table of document.querySelectorAll("details.rows")) table.open = false;
