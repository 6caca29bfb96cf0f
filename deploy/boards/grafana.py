"""Grafana's JSON of a dashboard."""

from collections.abc import Mapping

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.boards.panels import Board, Panel
from deploy.boards.queries import VARIABLES

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "moebius"
_Built = stat.Panel | timeseries.Panel | table.Panel | statetimeline.Panel


def write(board: Board) -> str:
    """The dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"moebius-{board.name}")
        .description(board.about)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Moebius")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, query in VARIABLES.items():
        built.with_variable(_variable(name, query))
    for row in board.rows:
        built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> _Built:
    built = _bare(panel)
    built.title(panel.title).description(panel.about).datasource(SOURCE)
    built.span(panel.width).height(panel.height)
    built.unit(f"suffix: {panel.unit}" if panel.unit == "tok/s" else panel.unit)
    steps = [Threshold(value=None, color=panel.base)]
    steps += [Threshold(value=value, color=colour) for value, colour in panel.thresholds.items()]
    built.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.max is not None:
        built.max(panel.max)
    if panel.decimals is not None:
        built.decimals(panel.decimals)
    for legend, colour in panel.colours.items():
        fixed = DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        built.override_by_name(legend, [fixed])
    for number, (legend, query) in enumerate(panel.queries.items()):
        built.with_target(_target(panel, chr(ord("A") + number), legend, query))
    return built


def _bare(panel: Panel) -> _Built:
    match panel.kind:
        case "stat":
            last = common.ReduceDataOptions().calcs(["lastNotNull"])
            return stat.Panel().graph_mode(kinds.BigValueGraphMode.AREA).reduce_options(last).no_value("none")
        case "table":
            # The query's time and number say nothing where labels are all.
            hidden = {"Time": True, "Value": panel.unit == "short" and not panel.thresholds}
            organize = DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
            return table.Panel().with_transformation(organize)
        case "states":
            return (
                statetimeline.Panel().mappings([_words(panel.words)]).show_value(kinds.VisibilityMode.NEVER)
            )
    built = (
        timeseries.Panel()
        .min(0)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
        .line_width(1)
        .fill_opacity({"lines": 8, "stack": 40, "bars": 70}[panel.kind])
    )
    if panel.kind == "bars":
        # Each event is in one bar, or two.
        built.draw_style(kinds.GraphDrawStyle.BARS).interval("1m")
    if panel.unit == "short":
        # Nothing is drawn as nothing.
        built.axis_soft_max(1)
    if panel.kind in ("stack", "bars"):
        built.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    if panel.thresholds and panel.kind == "lines":
        style = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        built.thresholds_style(style)
    return built


def _words(words: Mapping[int, tuple[str, str]]) -> ValueMap:
    return ValueMap(
        options={
            str(value): ValueMappingResult(text=text, color=colour, index=place)
            for place, (value, (text, colour)) in enumerate(words.items())
        }
    )


def _target(panel: Panel, ref: str, legend: str, query: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref).expr(query).datasource(SOURCE)
    if panel.kind == "table":
        return target.instant().format(PromQueryFormat.TABLE)
    return target.range().legend_format(legend)
