"""The benchmarks' page matches the catalogue and the records."""

import pathlib

from benchmarks import catalogue, page, results

ROOT = pathlib.Path(__file__).parents[2]


def test_each_quote_names_rows_of_its_record():
    kept = {(one["name"], one["backend"]): one for one in results.saved()}
    for benchmark in catalogue.BENCHMARKS:
        for quote in benchmark.quotes or ():
            record_ = kept[benchmark.name, quote.backend]
            (table,) = [
                one for one in record_["tables"] if one["title"] == quote.table
            ]
            assert {*quote.columns, *quote.where} <= set(table["rows"][0])


def test_each_benchmark_of_the_catalogue_is_a_module_that_runs_alone():
    for benchmark in catalogue.BENCHMARKS:
        path = ROOT / "benchmarks" / f"{benchmark.name}.py"
        assert '\nif __name__ == "__main__":\n' in path.read_text("utf-8")


def test_the_page_in_the_guide_matches_the_records():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert text == page.render(results.saved())
