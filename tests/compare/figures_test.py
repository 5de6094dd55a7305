"""The arithmetic, tables and plots of bench/compare."""

import sys
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/compare"))

from kvcompare import figures, plots, tables  # noqa: E402


class FiguresTest(unittest.TestCase):
    def test_runs_share_no_beginning(self):
        self.assertEqual(figures.token_ids(3, 0), [100, 8019, 15938])
        firsts = {figures.token_ids(1, run)[0] for run in range(1000)}
        self.assertEqual(len(firsts), 1000)

    def test_spread(self):
        found = figures.spread([3.0, 1.0, 10.0, 2.0])
        self.assertEqual(found, {"median": 2.5, "min": 1.0, "max": 10.0, "runs": 4})

    def test_a_percentile_is_a_measured_value(self):
        values = [float(i) for i in range(1, 101)]
        self.assertEqual(figures.percentile(values, 0.5), 50.0)
        self.assertEqual(figures.percentile(values, 0.99), 99.0)
        self.assertEqual(figures.percentile([7.0], 0.99), 7.0)

    def test_slope(self):
        self.assertAlmostEqual(figures.slope([5.0, 7.0, 9.0, 11.0]), 2.0)
        self.assertAlmostEqual(figures.slope([1.0, 1.0, 1.0]), 0.0)

    def test_smooth_takes_medians(self):
        points = figures.smooth([1.0, 2.0, 90.0, 4.0, 5.0], 3)
        self.assertEqual(points, [(1.0, 2.0), (3.5, 4.5)])

    def test_marks(self):
        quiet = {"read_gb_s": 40.0, "gflop_s": 300.0}
        near = {"read_gb_s": 37.0, "gflop_s": 310.0}
        slower = {"read_gb_s": 35.0, "gflop_s": 300.0}
        fewer = {"read_gb_s": 40.0, "gflop_s": 200.0}
        self.assertEqual(figures.marks(quiet, near, 0.01), [])
        self.assertEqual(figures.marks(quiet, slower, 0.0), ["probes differ by 12%"])
        self.assertEqual(figures.marks(slower, quiet, 0.0), ["probes differ by 12%"])
        self.assertEqual(figures.marks(quiet, fewer, 0.0), ["probes differ by 33%"])
        self.assertEqual(figures.marks(quiet, quiet, 0.2), ["others used 20% of the CPUs"])

    def test_roofline_share(self):
        # 100 MB of weights and 1000 tokens of 10 KB: 110 MB, 100 times a second.
        share = figures.roofline_share(100.0, 100e6, 10e3, 1000, 22.0)
        self.assertAlmostEqual(share, 0.5)

    def test_agreement(self):
        self.assertEqual(figures.agreement([1, 2, 3], [1, 2, 3]), 3)
        self.assertEqual(figures.agreement([1, 9, 3], [1, 2, 3]), 1)
        self.assertEqual(figures.agreement([], [1]), 0)

    def test_log_prob_difference_is_absolute(self):
        found = figures.log_prob_difference([-1.0, -2.0], [-1.5, -1.0])
        self.assertEqual(found, {"mean": 0.75, "max": 1.0, "tokens": 2})
        with self.assertRaises(ValueError):
            figures.log_prob_difference([-1.0], [-1.0, -2.0])


class TablesTest(unittest.TestCase):
    def test_markdown(self):
        self.assertEqual(
            tables.markdown(["a", "b"], [["1", "2"]]), "| a | b |\n| --- | --- |\n| 1 | 2 |\n"
        )

    def test_numbers_show_what_can_be_trusted(self):
        shown = [tables.number(value) for value in (1234.56, 99.94, 1.234, 0.0, None)]
        self.assertEqual(shown, ["1235", "99.9", "1.23", "0.00", "-"])

    def test_ranged(self):
        self.assertEqual(tables.ranged(figures.spread([1.0, 2.0, 3.0])), "2.00 (1.00 to 3.00)")
        self.assertEqual(tables.ranged(None), "-")
        self.assertEqual((tables.share(0.853), tables.mebibytes(2**21)), ("85%", "2"))


class PlotsTest(unittest.TestCase):
    def test_ticks_are_round_and_cover(self):
        for least, most in ((0, 7), (32, 8000), (0, 0.013), (5, 5), (0, 0)):
            found = plots.ticks(least, most)
            self.assertLessEqual(found[0], least)
            self.assertGreaterEqual(found[-1], most)
            self.assertGreaterEqual(len(found), 2)
            self.assertLessEqual(len(found), 12)

    def test_a_plot_is_well_formed_and_inside(self):
        names = [f"peer <{i}> & co" for i in range(9)]
        series = {name: [(32, 10.0 + i), (2000, 5.0)] for i, name in enumerate(names)}
        text = plots.line_plot("A & B", "x", "y", series)
        root = xml.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        self.assertEqual(len(root.findall(f"{space}circle")), 18)
        for circle in root.findall(f"{space}circle"):
            x, y = float(circle.get("cx")), float(circle.get("cy"))
            self.assertTrue(plots.LEFT <= x <= plots.WIDTH - plots.RIGHT, x)
            self.assertTrue(plots.TOP <= y <= plots.HEIGHT - plots.BOTTOM, y)
        shown = [element.text for element in root.findall(f"{space}text")]
        for name in names:
            self.assertIn(name, shown)
        self.assertEqual(text, plots.line_plot("A & B", "x", "y", series))

    def test_one_point_is_enough(self):
        xml.fromstring(plots.line_plot("t", "x", "y", {"a": [(1, 0.0)]}))


if __name__ == "__main__":
    unittest.main()
